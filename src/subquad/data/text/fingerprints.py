"""What a file or a source contains, in a few bytes, so that a change is noticed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from subquad.data.hub import load_hub
from subquad.data.text.sources import TextSource
from subquad.files import checksum, digest


def file_record(path: str | Path, known: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Path, size, time of change and SHA-256 of a file. The content is read only when no known record has the same
    path, size and time."""
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        several = "; several files are a list: [a, b]" if "," in str(path) else ""
        raise ValueError(f"{path}: there is no such file{several}") from None
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder, a file is needed")
    quick = {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    for record in known:
        if all(record.get(key) == value for key, value in quick.items()) and "sha256" in record:
            return {**quick, "sha256": record["sha256"]}
    return {**quick, "sha256": checksum(Path(path))}


def source_records(source: TextSource, known: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """What a source contains: one record for each file, or one for a hub data set."""
    if source.is_hub:
        data_set = load_hub(source.files[0], source.subset, source.split)
        content = {"rows": len(data_set), "cache": str(getattr(data_set, "_fingerprint", ""))}
        return [{"path": source.files[0], "size": 0, "sha256": digest(content)}]
    known = list(known)
    return [file_record(path, known) for path in source.contents]


def reading(source: TextSource) -> dict[str, Any]:
    """How a source is read: everything but where its files lie."""
    return {**source.model_dump(mode="json", exclude={"files"}), "format": source.kind}
