"""Small files that describe others: read with clear errors, written so that a crash leaves the old or the new one."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import yaml


def read_description(path: Path, format: object, what: str) -> dict[str, Any]:
    """The JSON file beside `what` it describes; missing, damaged or of another format, it is a ValueError."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} holds no {what}: there is no {path.name} in it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.get("format") != format:
        raise ValueError(f"{path} does not describe a {what} of format {format}")
    return content


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """A YAML file that must hold a mapping, which is a `what`."""
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no {what} {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no {what}: it must be a mapping, such as `task: translation`")
    return content


def write_json(path: Path, content: Any) -> None:
    """Under a temporary name, synced, renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    replace_synced(temporary, path)


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None


def replace_synced(temporary: Path, final: Path) -> None:
    """Gives a written file its name once it is on the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
