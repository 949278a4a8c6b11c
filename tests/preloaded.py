"""Starts programs of Python without importing torch anew, which takes five seconds of every one that trains.

    with preloaded():
        subprocess.run([sys.executable, "-m", "subquad", "train", ...])

Within the block such programs are forked from a process that has imported torch and subquad and done nothing else, and
so are the programs that these start. They are processes like any other: children of the one that starts them, with
files, signals and exit codes of their own. Tests use it where the start of a program is not what they are about.
It needs Linux; elsewhere nothing is changed.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTS = (
    "torch._dynamo", "torch.distributed.fsdp", "sklearn.datasets", "babel.core", "subquad.api", "subquad.cli.main",
    *(f"subquad.kernels.{name}.cpu" for name in ("chunk_values", "landmark_attention", "window_attention")),
)  # fmt: skip
"""What the programs of tests import, but for kernels of numba: their threads would not survive a fork. torch imports
its compiler as soon as an optimiser is built."""
PR_SET_CHILD_SUBREAPER = 36
"""Of <sys/prctl.h>: descendants whose parent has ended become children of the process that asks for it."""
MOST_BYTES = 1 << 20
Usual = subprocess.Popen
_server: socket.socket | None = None


class Preloaded(Usual):
    """`python [-u]` with `-m MODULE`, `-c CODE` or `FILE.py` as a fork of the server; others are started as always.

    No preexec_fn is called in a fork. Ctrl-C interrupts it, also where the suite runs in the background and ignores it.
    """

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, _, cwd, env, _, _, shell, *pipes = rest[:13]
        words = [str(word) for word in args if word != "-u"] if isinstance(args, list | tuple) else []
        if shell or words[:1] != [sys.executable] or not (words[1] in ("-m", "-c") or words[1].endswith(".py")):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        request = {
            "words": words[1:],
            "unbuffered": "-u" in args,
            "new_session": rest[18],
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        ends = (pipes[0], pipes[3], pipes[5])  # the program's stdin, stdout and stderr; -1: those of this process
        server = start_server()
        streams = [own if end == -1 else end for own, end in enumerate(ends)]
        socket.send_fds(server, [json.dumps(request).encode()], streams)
        self.pid = int(server.recv(MOST_BYTES))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@contextmanager
def preloaded() -> Iterator[None]:
    """Within the block, programs of Python start quickly."""
    if not sys.platform.startswith("linux"):
        yield
        return
    subprocess.Popen = Preloaded  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = Usual  # type: ignore[misc]


@contextmanager
def afresh() -> Iterator[None]:
    """Within the block, programs are started as always: what they import themselves is what a test is about."""
    before = subprocess.Popen
    subprocess.Popen = Usual  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def start_server() -> socket.socket:
    """Starts the server at the first call. It ends when this process does, since the socket is closed then."""
    global _server
    if _server is None:
        adopt_orphans()
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # a pool of threads would not survive a fork
            Usual(command, cwd=ROOT, env=one_thread, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    return _server


def see_file(fd: Any) -> None:
    """In place of `os.fsync`: what was written outlives its process anyway, and no test has a power failure to wait
    for the disk for."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


def adopt_orphans() -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0


# ---------------------------------------------------------------------- in the server


def serve(requests: socket.socket) -> dict[str, Any]:
    """Forks a process for each request, and returns the request in that process. Ends with the last request."""
    while True:
        content, streams, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not content:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            # The process in between ends at once, so that the new one becomes a child of the one that asked for it.
            own_parent = os.getpid()
            if new := os.fork():
                os.write(writer, str(new).encode())
                os._exit(0)
            while os.getppid() == own_parent:  # not yet
                time.sleep(0.001)
            requests.close()
            for own, given in enumerate(streams):
                os.dup2(given, own)
            for given in (*streams, reader, writer):
                os.close(given)
            return json.loads(content)
        os.waitpid(between, 0)
        requests.send(os.read(reader, MOST_BYTES))
        for given in (*streams, reader, writer):
            os.close(given)


def main() -> None:
    global _server
    for name in IMPORTS:
        with suppress(ImportError):  # of an extra
            importlib.import_module(name)
    with suppress(ImportError):
        prepare_numba()
    os.fsync = see_file
    gc.freeze()
    faulthandler.enable()  # a program that is aborted because it does not end says where it is
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    while True:  # in the new process: a server of its own, for programs that it starts
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            break
        _server.close()
        for own in range(3):  # who reads what the program writes waits until nobody else could
            os.dup2(os.open(os.devnull, os.O_RDWR), own)
        request = serve(theirs)
    adopt_orphans()
    subprocess.Popen = Preloaded  # type: ignore[misc]
    run(request)


def prepare_numba() -> None:
    """Lets numba learn the functions that it knows, which the first kernel of a process would wait for."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def run(request: dict[str, Any]) -> None:
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["unbuffered"]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    if request["words"][0] == "-m":
        sys.path.insert(0, request["cwd"])
        sys.argv = request["words"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif request["words"][0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *request["words"][2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(request["words"][1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = request["words"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
