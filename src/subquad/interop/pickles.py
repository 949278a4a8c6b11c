"""Old `.pt` files, read as data: the one place where a pickle is opened.

torch's restricted reader builds tensors, numbers, text and containers, and refuses every other name that a pickle asks
for before anything of it runs. Beside these, argparse's namespaces are allowed, and a few classes of the originals are
replaced by stand-ins, which hold what was stored and do nothing.
"""

import argparse
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.files import is_bounded

NUMBER = re.compile(r"[<>=|]?[fiub][1248]")
"""How numpy spells the types of plain numbers."""


class StandIn:
    """Holds the attributes of an object whose class is not here."""


class NumberType:
    """In place of numpy.dtype: the name of a type, such as f8."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """state: a version, the order of bytes, and what plain numbers do not have."""
        order = state[1] if len(state) > 1 else "|"
        self.name = f"{order}{self.name}"


def number(kind: NumberType, data: bytes) -> float | int | bool:
    """In place of numpy's own function: a number of its type and bytes."""
    if not isinstance(kind, NumberType) or not NUMBER.fullmatch(str(kind.name)):
        raise pickle.UnpicklingError("a number of numpy has no plain type")
    return np.frombuffer(data, np.dtype(kind.name), 1)[0].item()


MOST_VALUES = 1_000_000
"""Tensors, numbers and texts of a checkpoint."""
METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter")
ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    (argparse.Namespace, "efficient_attention.NestedNamespace"),
    (NumberType, "numpy.dtype"),
    (number, "numpy.core.multiarray.scalar"),
    (number, "numpy._core.multiarray.scalar"),
    *((StandIn, f"fairseq.meters.{name}") for name in METERS),
    *((StandIn, f"fairseq.logging.meters.{name}") for name in METERS),
]
"""What a pickle may ask for beside torch's own list, and what it gets."""


def read_pickle(path: str | Path) -> Any:
    """The content of a file that torch.save wrote, with tensors on the CPU; all else is refused, and nothing runs."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is a folder, a file is needed" if path.is_dir() else f"there is no file {path}")
    try:
        with torch.serialization.safe_globals(ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # advice on protocols: what cannot be read is an error below
            _check_packing(path)
            contents = torch.load(path, map_location="cpu", weights_only=True)
        if not is_bounded(contents, _parts, MOST_VALUES):
            raise ValueError("its parts refer to one another without end")
        return contents
    except pickle.UnpicklingError as error:
        # torch's own text advises to read the file without restrictions: it is not passed on
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {asked[1]}, which is no plain data" if asked else "it is no file of torch.save"
        raise ValueError(
            f"{path} is refused: {what}; nothing of it was run. Checkpoints may hold tensors, numbers, text and "
            "argparse namespaces"
        ) from None
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        what = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        raise ValueError(f"{path} is damaged, or no file of torch.save ({what})") from error


def _check_packing(path: Path) -> None:
    """torch.save compresses nothing; what is compressed could unpack to a thousand times its size."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            for member in packed.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{member.filename} is compressed, which torch.save does not do")


def _parts(value: Any) -> Iterable[Any]:
    """What a value of a checkpoint holds. A tensor that claims more numbers than are stored is refused."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type != "cpu":
            raise ValueError(f"a tensor is {value.layout} on {value.device}")
        stored = value.untyped_storage().nbytes()
        if value.numel() * value.element_size() > stored:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} has only {stored:,} bytes")
        return ()
    if isinstance(value, argparse.Namespace | StandIn):
        return vars(value).values()
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def options_of(given: Any) -> dict[str, Any]:
    """A namespace or mapping as plain data, namespaces within it too."""
    options = vars(given) if isinstance(given, argparse.Namespace) else given
    if not isinstance(options, Mapping):
        raise ValueError(f"options are a namespace or a mapping, not {type(given).__name__}")
    return {str(name): _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    return options_of(value) if isinstance(value, argparse.Namespace | Mapping) else value
