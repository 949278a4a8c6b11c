"""The restricted loader of old `.pt` files. No other module opens a pickle.

torch's restricted reader builds tensors, numbers, text and containers. It refuses every other name that a pickle asks
for, before anything runs. In addition, namespaces of argparse are allowed, and a few classes of the original programs
are replaced by placeholders, which hold what was stored and do nothing. So is functools.partial: the function in it is
a name, and nothing can be called by that name.

What torch allows can still turn a few bytes into gigabytes (a bytearray of a given length) or take for ever (hashing
nested tuples). So each pickle is simulated before torch reads it: fewer names are allowed, and the work of hashing and
of function calls is counted and limited.
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
"""Matches the names that numpy gives to the types of plain numbers."""


class Placeholder:
    """Holds the attributes of an object whose class does not exist here."""


class PartialCall(Placeholder):
    """Takes the place of functools.partial. function: what it would call, a class that only stands for a name."""

    def __init__(self, function: Any) -> None:
        self.function, self.args, self.keywords = function, (), dict[str, Any]()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """state: the function, its arguments by position and by name, and attributes, which a partial seldom has."""
        self.function, self.args, keywords, _ = state
        self.keywords = dict(keywords or {})


class LayerNorm(Placeholder):
    """Takes the place of torch's class where a checkpoint names it as the argument of something."""


class NumberType:
    """Takes the place of numpy.dtype, and holds the name of a type, such as f8."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """state: a version, the byte order, and more that plain numbers do not have."""
        order = state[1] if len(state) > 1 else "|"
        self.name = f"{order}{self.name}"


def build_number(kind: NumberType, data: bytes) -> float | int | bool:
    """Takes the place of numpy's function that builds a number from its type and bytes."""
    if not isinstance(kind, NumberType) or not NUMBER.fullmatch(str(kind.name)):
        raise pickle.UnpicklingError("a number of numpy has no plain type")
    return np.frombuffer(data, np.dtype(kind.name), 1)[0].item()


MAX_VALUES = 1_000_000
"""The largest number of tensors, numbers and texts in a checkpoint."""
LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
NAMED_ONLY = {LAYER_NORM}
"""Names that a pickle may have as values, but never call."""
METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter")
ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    (argparse.Namespace, "efficient_attention.NestedNamespace"),
    (NumberType, "numpy.dtype"),
    (build_number, "numpy.core.multiarray.scalar"),
    (build_number, "numpy._core.multiarray.scalar"),
    (PartialCall, "functools.partial"),
    (LayerNorm, LAYER_NORM),
    *((Placeholder, f"fairseq.meters.{name}") for name in METERS),
    *((Placeholder, f"fairseq.logging.meters.{name}") for name in METERS),
]
"""The names that a pickle may ask for in addition to torch's own list, and what it gets for them."""
ALLOWED_NAMES = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode"),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "complex")),
    *("torch.Size", "torch.device", "torch.nn.parameter.Parameter"),
    *(f"torch._utils._rebuild_{what}" for what in ("tensor", "tensor_v2", "parameter")),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    *(f"torch.{name}" for name in vars(torch) if name.endswith("Storage")),
    *(one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in ALLOWED),
}
"""All names that a pickle may ask for. torch's own list has more, such as functions that build large objects."""
MAX_HASHED = 10_000
"""The largest number of values inside a tuple. A tuple that is a key is hashed again each time, recursively."""
MAX_COLLIDING = 1000
"""The most keys whose hashes somebody can choose to be equal: inserting n such keys takes the square of n steps."""
CERTAIN_HASH = 1 << 60
"""Whole numbers below this have different hashes. Those of texts and bytes cannot be foreseen."""
HASHING = {"collections.OrderedDict", "collections.Counter", "builtins.set", "__builtin__.set"}
"""Functions that hash what they are given."""
CHANGING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")
"""Instructions that change an item which others may hold as well."""
TOO_LARGE = "its parts refer to one another so often that it would become too large"
ZIP = b"PK\3\4"
LEGACY_PICKLES = 5
"""A file that is no archive has this many: a number, a version, the system, the contents, the keys of storages."""


def read_pickle(path: str | Path) -> Any:
    """Returns the content of a file that torch.save wrote, with tensors on the CPU. Other files are refused."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is a folder, but a file is needed" if path.is_dir() else f"there is no file {path}")
    try:
        with torch.serialization.safe_globals(ALLOWED), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # advice about protocols; what cannot be read raises an error below
            for steps in _pickles(path):
                _simulate(steps)
            contents = torch.load(path, map_location="cpu", weights_only=True)
        stored: dict[int, int] = {}
        if not is_bounded(contents, partial(_parts, stored), MAX_VALUES):
            raise ValueError(TOO_LARGE)
        if sum(stored.values()) > path.stat().st_size:  # storages that were promised but never read
            raise ValueError(
                f"its tensors have {sum(stored.values()):,} bytes, but the file has {path.stat().st_size:,}"
            )
        return contents
    except pickle.UnpicklingError as error:
        # torch's own message advises to read the file without restrictions, so it is not shown
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {asked[1]}, which is no plain data" if asked else "torch.save did not write it"
        raise ValueError(
            f"{path} is refused: {what}. Nothing of it was run. Checkpoints may hold tensors, numbers, text and "
            "argparse namespaces"
        ) from None
    except Exception as error:  # the kind of the error depends on where the file is damaged
        what = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        raise ValueError(f"{path} is damaged, or torch.save did not write it ({what})") from error


# ---------------------------------------------------------------------- checks before reading


def _pickles(path: Path) -> Iterator[IO[bytes]]:
    """Yields the pickles that torch will read, each at its first instruction.

    Compressed archives are refused: torch.save compresses nothing, and they could become a thousand times larger.
    """
    with path.open("rb") as file:
        start = file.peek(len(ZIP))[: len(ZIP)]
        if start != ZIP:  # torch looks for the same bytes
            if start[:1] != pickle.PROTO:  # a text, for example: its letters are instructions of a pickle too
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
            raise ValueError(f"it has {len(found)} files data.pkl, but torch.save writes one")
        yield io.BytesIO(packed.read(found[0]))


@dataclass
class StackItem:
    """A value on the stack of a pickle that is simulated, but not built.

    size: the number of values and characters in it, as if it were written out in full. hashed: the number of values
    that its hash reads; only tuples have several. colliding: how many values in it could be keys with equal hashes.
    text: the content of a text or name. parts: the items of a tuple.
    """

    size: int = 1
    hashed: int = 1
    colliding: int = 0
    text: str = ""
    parts: Sequence["StackItem"] = ()


def _simulate(file: IO[bytes]) -> None:
    """Simulates a pickle. Names that are not allowed, large tuples and large arguments of functions are refused."""
    stack: list[StackItem | None] = []  # None is a mark
    memo: dict[Any, StackItem | None] = {}
    cost = colliding = 0
    for step, argument, _ in pickletools.genops(file):
        if step.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif step.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif step.name == "MARK":
            stack.append(None)
        elif step.name == "GLOBAL":
            stack.append(_check_name(str(argument)))
        else:
            taken = _pop_arguments(stack, step)
            cost += _step_cost(step.name, taken)
            colliding += _colliding_keys(step.name, taken)
            if cost > MAX_VALUES:
                raise ValueError(TOO_LARGE)
            if colliding > MAX_COLLIDING:
                raise ValueError(f"more than {MAX_COLLIDING} of its keys are large numbers or tuples")
            stack += _results(step, argument, taken)


def _check_name(argument: str) -> StackItem:
    """Refuses a name that is not allowed. argument: a module and a name in it, with a space between them."""
    name = argument.replace(" ", ".", 1)
    if name not in ALLOWED_NAMES:
        raise pickle.UnpicklingError(f"GLOBAL {name}")
    return StackItem(text=name)


def _pop_arguments(stack: list[StackItem | None], step: pickletools.OpcodeInfo) -> list[StackItem]:
    """Removes the arguments of an instruction from the stack, up to the last mark if it takes that many."""
    taken: list[StackItem] = []
    for kind in reversed(step.stack_before):
        if kind is pickletools.markobject:
            continue  # it was removed with the items above it
        while (one := stack.pop()) is not None:
            taken.append(one)
            if kind is not pickletools.stackslice:
                break
    return taken[::-1]


def _step_cost(step: str, taken: Sequence[StackItem]) -> int:
    """Returns how many values an instruction hashes, or passes to a function."""
    if step in ("SETITEM", "SETITEMS"):
        return sum(key.hashed for key in taken[1::2])
    if step in ("REDUCE", "NEWOBJ") and taken[0].text in NAMED_ONLY:
        raise pickle.UnpicklingError(f"GLOBAL {taken[0].text}")
    if step == "REDUCE" and taken[0].text == "_codecs.encode" and [p.text for p in taken[1].parts[1:]] != ["latin1"]:
        raise pickle.UnpicklingError("bytes have an encoding that pickles do not use")  # some encodings take for ever
    return sum(one.size for one in taken[1:]) if step in ("REDUCE", "NEWOBJ", "BUILD") else 0


def _colliding_keys(step: str, taken: Sequence[StackItem]) -> int:
    """Returns how many keys an instruction inserts whose hashes could be equal."""
    if step in ("SETITEM", "SETITEMS"):
        return sum(key.colliding for key in taken[1::2])
    return sum(one.colliding for one in taken[1:]) if step == "REDUCE" and taken[0].text in HASHING else 0


def _results(step: pickletools.OpcodeInfo, argument: Any, taken: Sequence[StackItem]) -> list[StackItem]:
    """Returns what an instruction leaves on the stack."""
    size = min(MAX_VALUES + 1, 1 + sum(one.size for one in taken))
    colliding = min(MAX_COLLIDING + 1, sum(one.colliding for one in taken))
    if step.name in CHANGING:
        taken[0].size, taken[0].colliding = size, colliding
        return [taken[0]]
    if step.name.startswith("TUPLE"):
        hashed = 1 + sum(one.hashed for one in taken)
        if hashed > MAX_HASHED:
            raise ValueError(TOO_LARGE)
        return [StackItem(size, hashed, 1 + colliding, parts=taken)]
    if isinstance(argument, str):
        return [StackItem(1 + len(argument), text=argument)]
    if step.name in ("REDUCE", "NEWOBJ"):  # it may be a tuple or a complex number
        return [StackItem(colliding=1)]
    large = isinstance(argument, int) and not -CERTAIN_HASH < argument < CERTAIN_HASH
    return [StackItem(colliding=int(large)) for _ in step.stack_after]


# ---------------------------------------------------------------------- checks after reading


def _parts(stored: dict[int, int], value: Any) -> Iterable[Any]:
    """Returns the values inside a value of a checkpoint. A tensor that claims more numbers than its storage is refused.

    stored: gets the number of bytes of each storage, by its address.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type != "cpu":
            raise ValueError(f"a tensor is {value.layout} on {value.device}")
        storage = value.untyped_storage()
        if value.numel() * value.element_size() > storage.nbytes():
            raise ValueError(f"a tensor of shape {tuple(value.shape)} has only {storage.nbytes():,} bytes")
        stored[storage.data_ptr()] = storage.nbytes()
        return ()
    if isinstance(value, argparse.Namespace | Placeholder):
        return vars(value).values()
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def to_plain_options(given: Any) -> dict[str, Any]:
    """Returns a namespace or mapping as a dict, and the namespaces inside it too."""
    options = vars(given) if isinstance(given, argparse.Namespace) else given
    if not isinstance(options, Mapping):
        raise ValueError(f"options must be a namespace or a mapping, not {type(given).__name__}")
    return {str(name): _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    return to_plain_options(value) if isinstance(value, argparse.Namespace | Mapping) else value
