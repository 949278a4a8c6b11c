"""Progress: one live line on a terminal, plain lines elsewhere, and the time left where it is known."""

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from subquad import progress as module
from subquad.progress import Progress, TrainingProgress, format_duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until a test moves it: the last number is the time."""
    times = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: times[-1])
    return times


def test_steps_in_a_log_are_numbered_lines(clock: list[float]) -> None:
    stream = io.StringIO()
    with Progress(3, stream=stream) as progress:
        for message in ("first", "second", "third"):
            clock.append(clock[-1] + 30)
            progress(message)
        progress.note("that was all")
    assert stream.getvalue().splitlines() == [
        "[1/3, 0:30] first",
        "[2/3, 1:00] second, 0:30 left",
        "[3/3, 1:30] third, 0:00 left",
        "that was all",
    ]


def test_steps_end_at_their_end_unless_something_failed() -> None:
    ended, failed = io.StringIO(), io.StringIO()
    with Progress(20, stream=ended) as progress:
        progress("only one")
    assert [line.partition(",")[0] for line in ended.getvalue().splitlines()] == ["[1/20", "[20/20"]
    with suppress(ValueError), Progress(20, stream=failed) as progress:
        progress("only one")
        raise ValueError("broken")
    assert failed.getvalue().count("\n") == 1, "what failed is not done"


def test_a_log_gets_a_line_every_ten_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    for number in range(1, 61):
        clock.append(clock[-1] + 0.5)
        progress.update(f"{number} lines")
    assert stream.getvalue().splitlines() == ["20 lines", "40 lines", "60 lines"]
    progress.update("asked for", log=True)
    progress.update("not asked for", log=False)
    assert stream.getvalue().splitlines()[3:] == ["asked for"]


def test_the_time_left_counts_from_the_first_update(clock: list[float]) -> None:
    """What was done before, as of a run that goes on, and the first update's own time tell nothing."""
    progress = Progress(100, stream=io.StringIO())
    assert progress.seconds_left() is None
    clock.append(clock[-1] + 1000)
    progress.update("goes on", 50)
    assert progress.seconds_left() is None
    clock.append(clock[-1] + 10)
    progress.update("later", 60)
    assert progress.seconds_left() == pytest.approx(40)
    progress.restart(10)
    assert progress.seconds_left() is None


def test_a_terminal_shows_one_line_that_goes_away() -> None:
    code = """
from subquad.progress import Progress
import sys
with Progress(2) as progress:
    progress("[first]")
    progress.note("a [note] that stays")
    progress("second")
    print("the result")
"""
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=child, stdout=subprocess.PIPE, env=environment, text=True
    )
    os.close(child)
    shown = os.read(parent, 100_000).decode()
    os.close(parent)
    assert done.stdout == "the result\n"  # what goes to a file is not drawn
    assert "[1/2] [first]" in shown
    assert re.search(r"\n?\r?\x1b\[2Ka \[note\] that stays\r\n", shown)
    assert shown.endswith("\x1b[1A\x1b[2K")  # the cursor goes up, and the line is empty


@pytest.mark.parametrize(("width", "shown"), [(60, "epoch 1 | update 12,345"), (95, "lr 1.00e-03"), (130, "GB")])
def test_a_training_shows_the_parts_that_fit_the_terminal(
    width: int, shown: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    with TrainingProgress(every=1, stream=stream, live=True) as progress:
        for update in (12_344, 12_345):
            clock.append(clock[-1] + 2)
            progress.show_update(1, update, {"loss": 2.0, "ppl": 7.39}, 100, 1e-3, update / 20_000, "images")
        drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", drawn) if line.strip()]
    assert all(len(line) <= width for line in lines)
    assert shown in lines[-1]
    assert lines[-1].rstrip().endswith("left")
    assert "…" not in drawn
    assert ("50 images/s" in lines[-1]) == (width > 100)


def test_durations() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_a_log_of_a_training_has_a_line_for_every_tenth_update() -> None:
    stream = io.StringIO()
    with TrainingProgress(every=10, stream=stream) as progress:
        for update in range(1, 31):
            progress.show_update(1, update, {"loss": 2.0, "ppl": 1.0, "primal": 0.5}, 100, 1e-3, update / 60)
        progress.note("validation: ppl 1.00")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("epoch 1 | update 10 | loss 2.000 | ppl 1.00 | primal 0.5 | lr 1.00e-03 | ")
    for part in ("targets/s", "left", "GB"):
        assert part in lines[0]
    assert "\r" not in stream.getvalue()
