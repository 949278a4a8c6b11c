"""Old `.pt` files, read as data: the one place where a pickle is opened.

torch's restricted reader builds tensors, numbers, text and containers, and refuses every other name that a pickle asks
for before anything of it runs. Beside these, argparse's namespaces are allowed, and a few classes of the originals are
replaced by stand-ins, which hold what was stored and do nothing.

What torch allows can still make gigabytes of a few bytes (a bytearray of a length) or take for ever (the hash of tuples
within tuples). So each pickle is followed before torch reads it: fewer names are allowed, and what is hashed or handed
to functions is counted.
"""

import argparse
import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

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
NAMES = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode"),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "complex")),
    *("torch.Size", "torch.device", "torch.nn.parameter.Parameter"),
    *(f"torch._utils._rebuild_{what}" for what in ("tensor", "tensor_v2", "parameter")),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    *(f"torch.{name}" for name in vars(torch) if name.endswith("Storage")),
    *(one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in ALLOWED),
}
"""All that a pickle may ask for: torch's own list has more, such as what makes a large object of a number."""
MOST_HASHED = 10_000
"""Values within a tuple: one that is a key is hashed anew each time, by a recursion."""
ENDLESS = "its parts refer to one another without end"
ZIP = b"PK\3\4"
LEGACY_PICKLES = 5
"""Of a file that is no archive: a number, a version, the system, the contents, the keys of the storages."""


def read_pickle(path: str | Path) -> Any:
    """The content of a file that torch.save wrote, with tensors on the CPU; all else is refused, and nothing runs."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is a folder, a file is needed" if path.is_dir() else f"there is no file {path}")
    try:
        with torch.serialization.safe_globals(ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # advice on protocols: what cannot be read is an error below
            for steps in _pickles(path):
                _check_steps(steps)
            contents = torch.load(path, map_location="cpu", weights_only=True)
        stored: dict[int, int] = {}
        if not is_bounded(contents, partial(_parts, stored), MOST_VALUES):
            raise ValueError(ENDLESS)
        if sum(stored.values()) > path.stat().st_size:  # storages that were promised and never read
            raise ValueError(f"its tensors have {sum(stored.values()):,} bytes, and it has {path.stat().st_size:,}")
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


# ---------------------------------------------------------------------- before it is read


def _pickles(path: Path) -> Iterator[IO[bytes]]:
    """The pickles that torch will read, each from its first step on. What it would have to unpack is refused:
    torch.save compresses nothing, and what is compressed could unpack to a thousand times its size."""
    with path.open("rb") as file:
        start = file.peek(len(ZIP))[: len(ZIP)]
        if start != ZIP:  # the sign that torch looks for, too
            if start[:1] != pickle.PROTO:  # a text, for one: its letters are steps of a pickle, too
                raise pickle.UnpicklingError("no pickle begins like this")
            for _ in range(LEGACY_PICKLES):
                if file.peek(1):
                    yield file
            return
    with zipfile.ZipFile(path) as packed:
        for member in packed.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{member.filename} is compressed, which torch.save does not do")
        found = [member for member in packed.infolist() if member.filename.lower().endswith("data.pkl")]
        if len(found) != 1:
            raise ValueError(f"it has {len(found)} files data.pkl, where torch.save writes one")
        yield io.BytesIO(packed.read(found[0]))


@dataclass
class Built:
    """Something on the stack of a pickle that is followed, but not built.

    size: values and characters in it when it is written out in full, as far as they are counted; hashed: values that
    its hash goes through, of which only a tuple has several. text: of a text or name; parts: of a tuple.
    """

    size: int = 1
    hashed: int = 1
    text: str = ""
    parts: Sequence["Built"] = ()


def _check_steps(file: IO[bytes]) -> None:
    """Follows a pickle to its end, and refuses what would be too much: names, tuples, and what functions are given."""
    stack: list[Built | None] = []  # None: a mark
    memo: dict[Any, Built | None] = {}
    handed = 0
    for step, argument, _ in pickletools.genops(file):
        if step.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif step.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif step.name == "MARK":
            stack.append(None)
        elif step.name == "GLOBAL":
            stack.append(_name(str(argument)))
        else:
            taken = _taken(stack, step)
            handed += _handed(step.name, taken)
            if handed > MOST_VALUES:
                raise ValueError(ENDLESS)
            stack += _built(step, argument, taken)


def _name(argument: str) -> Built:
    """argument: a module and a name in it, with a space between them."""
    name = argument.replace(" ", ".", 1)
    if name not in NAMES:
        raise pickle.UnpicklingError(f"GLOBAL {name}")
    return Built(text=name)


def _taken(stack: list[Built | None], step: pickletools.OpcodeInfo) -> list[Built]:
    """What a step takes from the stack, in order; all since the last mark where it takes so many."""
    taken: list[Built] = []
    for kind in reversed(step.stack_before):
        if kind is pickletools.markobject:
            continue  # it went with what follows it
        while (one := stack.pop()) is not None:
            taken.append(one)
            if kind is not pickletools.stackslice:
                break
    return taken[::-1]


def _handed(step: str, taken: Sequence[Built]) -> int:
    """How much a step makes functions copy, or hashes go through."""
    if step in ("SETITEM", "SETITEMS"):
        return sum(key.hashed for key in taken[1::2])
    if step == "REDUCE" and taken[0].text == "_codecs.encode" and [p.text for p in taken[1].parts[1:]] != ["latin1"]:
        raise pickle.UnpicklingError("bytes are in another encoding than pickles have them in")  # some take for ever
    return sum(one.size for one in taken[1:]) if step in ("REDUCE", "NEWOBJ", "BUILD") else 0


def _built(step: pickletools.OpcodeInfo, argument: Any, taken: Sequence[Built]) -> list[Built]:
    """What a step leaves on the stack."""
    size = min(MOST_VALUES + 1, 1 + sum(one.size for one in taken))
    if step.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):  # into what others may hold as well
        taken[0].size = size
        return [taken[0]]
    if step.name.startswith("TUPLE"):
        hashed = 1 + sum(one.hashed for one in taken)
        if hashed > MOST_HASHED:
            raise ValueError(ENDLESS)
        return [Built(size, hashed, parts=taken)]
    if isinstance(argument, str):
        return [Built(1 + len(argument), text=argument)]
    return [Built() for _ in step.stack_after]


# ---------------------------------------------------------------------- after it was read


def _parts(stored: dict[int, int], value: Any) -> Iterable[Any]:
    """What a value of a checkpoint holds. A tensor that claims more numbers than its storage has is refused; stored:
    gets the bytes of each storage by its address."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type != "cpu":
            raise ValueError(f"a tensor is {value.layout} on {value.device}")
        storage = value.untyped_storage()
        if value.numel() * value.element_size() > storage.nbytes():
            raise ValueError(f"a tensor of shape {tuple(value.shape)} has only {storage.nbytes():,} bytes")
        stored[storage.data_ptr()] = storage.nbytes()
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
