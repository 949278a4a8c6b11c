"""Small files that describe others: read with clear errors, written so that a crash leaves the old or the new one.

A description carries the checksum of its own content: a digit that a disk changed is noticed, though it is still JSON.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

CHECKSUM = "checksum"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What the system says when a disk does not take a file."""
MOST_VALUES, MOST_WITHIN = 100_000, 100
"""More than any recipe has: values in all, and values within one another."""
INT_TAG = "tag:yaml.org,2002:int"
MAX_DIGITS, MAX_KEY_DIGITS = 1000, 18
"""The most characters of a whole number, since numbers in base 60 (1:59:59) take quadratic time; and of one that is a
key, since larger ones can be chosen so that all of their hashes are equal."""


def read_metadata(path: Path, format: object, what: str, entries: Iterable[str] = ()) -> dict[str, Any]:
    """Reads the JSON file that describes `what`. A missing, damaged or unknown file is a ValueError.

    entries: what it must have; without them it describes something else.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} holds no {what}: there is no {path.name} in it") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of thousands of digits, ...
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.get("format") != format or not set(entries) <= content.keys():
        raise ValueError(f"{path} does not describe a {what} of format {format}")
    if CHECKSUM in content and content.pop(CHECKSUM) != digest(content):
        raise ValueError(f"{path} is damaged: its content and its checksum differ")
    return content


@contextmanager
def wrap_corrupt_data_errors(what: str) -> Iterator[None]:
    """Turns errors of Python in the block into a ValueError: data that others wrote may lack parts or have other types.

    It shows wherever it is used first, as an error of Python's; the message names it, and `--debug` shows where.
    """
    try:
        yield
    except (ValueError, OSError, NameError, ImportError):  # the last two are never the data's fault
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{what} is damaged, or of a version that is not known here ({reason[:300]})") from error


def read_bytes(path: str | Path) -> bytes:
    """Returns the content of a file. A missing file, and a folder, raise a ValueError."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, but a file is needed") from None


def decode_utf8(data: bytes, path: str) -> str:
    """Returns the text of a file's content. Bytes that are not UTF-8 raise a ValueError that names their line."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8") from None


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping. what: what the file is, for messages."""
    try:
        content = parse_yaml(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no {what} {path}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no {what}: it must be a mapping, such as `task: translation`")
    return content


def parse_yaml(text: str) -> Any:
    """Returns the data of a YAML text. A ValueError says in one line why it cannot be read."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        # Parts that refer to one another make billions of values of a few lines: they are counted before they are made.
        if not is_bounded(root, _parts_of_node, MOST_VALUES):
            raise ValueError(f"it has more than {MOST_VALUES:,} values, or more than {MOST_WITHIN} within one another")
        return None if root is None else loader.construct_document(root)
    except Exception as error:  # wrong dates, tags and numbers raise whatever they lead the parser to
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def _parts_of_node(node: Any) -> Iterable[Any]:
    """Returns the nodes directly within a node. Whole numbers that take long to read or to hash are refused."""
    if isinstance(node, yaml.ScalarNode) and node.tag == INT_TAG and len(node.value) > MAX_DIGITS:
        raise ValueError(f"it has a whole number of {len(node.value):,} characters, more than {MAX_DIGITS}")
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag == INT_TAG and len(key.value) > MAX_KEY_DIGITS:
                raise ValueError(f"it has a key that is a whole number of more than {MAX_KEY_DIGITS} characters")
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def is_bounded(root: Any, parts: Callable[[Any], Iterable[Any]], most: int) -> bool:
    """Whether data has at most `most` values when it is written out in full, and not too many within one another.

    parts: the values directly within a value.
    """
    count, waiting = 0, [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > most or depth > MOST_WITHIN:
            return False
        waiting += [(part, depth + 1) for part in parts(value)]
    return True


def to_checksummed_json(content: Mapping[str, Any]) -> str:
    """Returns a description as JSON, with its checksum in it."""
    plain = json.loads(json.dumps(content))  # as it will be read: names are text, tuples are lists
    return json.dumps({**plain, CHECKSUM: digest(plain)}, indent=2) + "\n"


def write_metadata(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, to_checksummed_json(content))


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    write_files({path: lambda temporary: temporary.write_text(text, encoding="utf-8")})


def write_files(contents: Mapping[Path, Callable[[Path], object]]) -> None:
    """Writes files that belong together: all of them under temporary names, synced, then renamed in their order.

    What cannot be written leaves nothing behind, and the old files stay.
    """
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in contents}
    try:
        for path, write in contents.items():
            with name_write_errors(path):
                write(temporaries[path])
        for path, temporary in temporaries.items():
            with name_write_errors(path):
                replace_synced(temporary, path)
    finally:
        for temporary in temporaries.values():  # after an error; room is what a full disk needs most
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yields a folder to write to, which gets its name at the end of the block. An error leaves nothing behind.

    What a process left that was killed is removed first.
    """
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{final} exists already; give a new folder, or remove it")
    prefix = f".{final.name}."
    for path in final.parent.iterdir() if final.parent.is_dir() else ():
        process = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and process.isdigit() and path.is_dir() and not is_alive(int(process)):
            shutil.rmtree(path, ignore_errors=True)
    temporary = final.with_name(f"{prefix}{os.getpid()}")
    with name_write_errors(final):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file():
                    sync_file(path)
            temporary.replace(final)
            sync_folder(final.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # it still exists only after an error


@contextmanager
def name_write_errors(path: Path) -> Iterator[None]:
    """Turns errors in the block that mean that the disk does not take `path` into an OSError with this name.

    The system's own errors have a name only where a file is opened, not where it is written. Those of libraries in
    Rust and C++ are of many types, and have the system's message in their text.
    """
    try:
        yield
    except Exception as error:
        text = f"{error}"
        number = error.errno if isinstance(error, OSError) else None
        if number not in DISK_ERRORS:
            number = next((one for one in DISK_ERRORS if os.strerror(one) in text), None)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def is_alive(process: int) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def digest(value: Any) -> str:
    """Returns the SHA-256 of JSON-compatible data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checksum(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None


def replace_synced(temporary: Path, final: Path) -> None:
    """Gives a written file its name once it is on the disk."""
    sync_file(temporary)
    temporary.replace(final)
    sync_folder(final.parent)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
