"""Signals of processes that tests start."""

import signal


def interruptible() -> None:
    """As preexec_fn: Ctrl-C interrupts the process, also where the suite runs in the background and ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
