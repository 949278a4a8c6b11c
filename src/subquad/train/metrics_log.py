"""metrics.jsonl of a run: one JSON object a line, appended and flushed, so that nothing measured is lost."""

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RESUMED = "resumed"


class MetricsLog:
    """Appends records to a file. A line that a killed process left half written is cut off first."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self.file).st_size
        end = size
        while end > 0 and os.pread(self.file, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            os.ftruncate(self.file, end)
        self.is_new = end == 0

    def write(self, event: str, update: int, values: Mapping[str, Any] | None = None) -> None:
        """Writes a record. event: "train", "valid", ... Numbers that are not finite become strings in JSON."""
        record = {"event": event, "update": update, "time": round(time.time(), 3), **(values or {})}
        line = json.dumps({key: _jsonable(value) for key, value in record.items()}) + "\n"
        end, data = os.fstat(self.file).st_size, line.encode()
        try:
            written = os.write(self.file, data)  # one call a line: it is there or it is not
            if written < len(data):  # the disk was full in the middle of it
                os.ftruncate(self.file, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, f"metrics cannot be written ({error.strerror})", str(self.path)) from None

    def resumed(self, update: int) -> None:
        """Says that the run went back to `update`: what was measured after it no longer counts."""
        self.write(RESUMED, update)

    def close(self) -> None:
        os.close(self.file)


def _jsonable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | Path, event: str | None = None) -> list[dict[str, Any]]:
    """Returns the records of one event, or of all. Those after an update that the run went back to do not count."""
    records: list[dict[str, Any]] = []
    lines = Path(path).read_text().split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            event_of, update = record["event"], record["update"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not a JSON record; the file is damaged") from None
        if event_of == RESUMED:
            records = [earlier for earlier in records if earlier["update"] <= update]
        records.append(record)
    return [record for record in records if event is None or record["event"] == event]
