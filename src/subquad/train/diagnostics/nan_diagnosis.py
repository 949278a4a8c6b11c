"""Numbers that are not finite: stop before the update, say where they came from, keep what reproduces them.

    rng = rng_state()                                       before a micro-batch
    loss = ...
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise diagnose(model, loss_of, [(batch, rng)], folder, update)

`diagnose` replays the batch with the same random numbers under hooks. The first module whose output is not finite, in
the order of computation, is named with the mechanism it belongs to; if all outputs are finite, the first gradient that
is not, in the order of the backward pass.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from subquad.files import replace_synced, write_json
from subquad.mixers import Mixer
from subquad.train.checkpoint import separate
from subquad.train.rng import rng_state, set_rng_state

Batch = Mapping[str, Tensor]
TENSORS, WEIGHTS, REPORT = "batch.safetensors", "model.safetensors", "report.json"


@dataclass(frozen=True)
class Culprit:
    """The first thing that was not finite."""

    what: str
    """"parameter", "output" or "gradient"."""
    name: str
    """The full name of the parameter or module."""
    kind: str
    """The module's class."""
    mechanism: str | None
    """The mixing mechanism that the module is or belongs to."""

    def __str__(self) -> str:
        mechanism = f" of the mechanism {self.mechanism}" if self.mechanism else ""
        where = f"{self.name} ({self.kind}{mechanism})"
        return {
            "parameter": f"the parameter {where} was not finite before the batch",
            "output": f"the first output that is not finite is that of {where}",
            "gradient": f"all outputs are finite; the first gradient that is not comes from {where}",
        }[self.what]


LOSS_GRADIENT = Culprit("gradient", "the loss", "no module", None)


class NotFiniteError(ValueError):
    """Training stopped before an update because a loss or a gradient is not finite."""

    def __init__(self, message: str, culprit: Culprit | None, folder: Path) -> None:
        super().__init__(message)
        self.culprit, self.folder = culprit, folder


def is_finite(*values: Tensor) -> bool:
    """Whether all numbers of all tensors are finite."""
    return all(bool(value.isfinite().all()) for value in values)


def diagnose(
    model: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    attempts: Sequence[tuple[Batch, Mapping[str, Tensor]]],
    folder: Path,
    update: int,
    tried: str = "",
) -> NotFiniteError:
    """Writes the batch that reproduces the failure to `folder`, and returns the error to raise.

    loss_of: forward pass of a batch to the scalar that is differentiated. attempts: the update's micro-batches, each
    with the state of the generators before it. tried: what was done against it before, to follow "is not finite". The
    model's gradients are dropped; generators end where they were.
    """
    before = rng_state()
    culprit, failing = None, attempts[0]
    try:
        for attempt in attempts:
            batch, rng = attempt
            set_rng_state(rng)
            culprit = find_culprit(model, lambda batch=batch: loss_of(batch))  # type: ignore[misc]
            if culprit is not None:
                failing = attempt
                break
    finally:
        set_rng_state(before)
        model.zero_grad(set_to_none=True)
    found = str(culprit) if culprit is not None else "no micro-batch shows it when it is replayed alone"
    place = folder / f"not-finite-{update:09d}"
    report = {"update": update, "found": found, "reproduced": culprit is not None}
    save_failure(place, *failing, report, model)
    message = f"update {update}: the loss or its gradient is not finite{tried}, and nothing was updated; {found}. "
    message += f"The batch, the weights and the generators' states are in {place}"
    return NotFiniteError(message, culprit, place)


def find_culprit(model: nn.Module, loss: Callable[[], Tensor]) -> Culprit | None:
    """Runs `loss` forward and, if all is finite, backward; None when every number was finite."""
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return _culprit(model, "parameter", name.rpartition(".")[0], name)
    model.zero_grad(set_to_none=True)
    watch = _Watch(model)
    with watch.hooks():
        value = loss()
        if watch.output is not None:
            return _culprit(model, "output", watch.output)
        if not is_finite(value):
            return Culprit("output", "the loss", "no module", None)
        value.backward()
    return watch.gradient


def _culprit(model: nn.Module, what: str, place: str, name: str | None = None) -> Culprit:
    """Describes the module that is called `place`. name: of the parameter, if it is one."""
    mechanism, path = None, ""
    for part in ["", *place.split(".")] if place else [""]:
        path = f"{path}.{part}".strip(".")
        module = model.get_submodule(path)
        if isinstance(module, Mixer):
            mechanism = module.name
    return Culprit(what, name or place or "the model", type(model.get_submodule(place)).__name__, mechanism)


@dataclass
class _Trace:
    """The modules that produced a tensor, innermost first, and those that read it, innermost last."""

    value: Tensor
    """Kept alive, so that its id stays its own."""
    producers: list[nn.Module] = field(default_factory=list)
    readers: list[nn.Module] = field(default_factory=list)


class _Watch:
    """Hooks that note the first module whose output, and in the backward pass whose gradient, is not finite.

    Tensor hooks leave the graph as it is, unlike module backward hooks. A gradient comes from a module when it is not
    finite at the module's input, at a part of the module or at its parameter, though it is at the module's output.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.output: str | None = None
        self.gradient: Culprit | None = None
        self.traces: dict[int, _Trace] = {}
        self.sound: set[nn.Module] = set()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                owner = self.model.get_submodule(name.rpartition(".")[0])
                handles.append(parameter.register_post_accumulate_grad_hook(self._parameter_hook(owner)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for value in _tensors((args, kwargs)):
            if value.requires_grad:
                self._trace(value).readers.append(module)

    def _after(self, module: nn.Module, _: Any, result: Any) -> None:
        outputs = [value for value in _tensors(result) if value.is_floating_point()]
        if self.output is None and not is_finite(*outputs):
            self.output = self.names[module]
        for value in outputs:
            if value.requires_grad:
                self._trace(value).producers.append(module)

    def _trace(self, value: Tensor) -> _Trace:
        trace = self.traces.get(id(value))
        if trace is None:
            trace = self.traces[id(value)] = _Trace(value)
            value.register_hook(self._gradient_hook(trace))
        return trace

    def _gradient_hook(self, trace: _Trace) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            if is_finite(gradient):
                self.sound.update(trace.producers)
            elif self.gradient is None:
                readers = [module for module in trace.readers if module in self.sound]
                self.gradient = self._blame((readers or trace.producers or [self.model])[-1 if readers else 0])

        return note

    def _parameter_hook(self, owner: nn.Module) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if self.gradient is None and parameter.grad is not None and not is_finite(parameter.grad):
                self.gradient = self._blame(owner)

        return note

    def _blame(self, module: nn.Module) -> Culprit:
        """Blames `module`, or the innermost one around it, whose output had a finite gradient."""
        name: str | None = self.names[module]
        while name is not None and self.model.get_submodule(name) not in self.sound:
            name = name.rpartition(".")[0] if name else None
        return LOSS_GRADIENT if name is None else _culprit(self.model, "gradient", name)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a result or of arguments, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


# ---------------------------------------------------------------------- the batch on disk


def save_failure(
    folder: Path, batch: Batch, rng: Mapping[str, Tensor], report: Mapping[str, Any], model: nn.Module
) -> None:
    """Writes a batch, the generators' states before it, the weights and a report in JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"batch.{key}": value for key, value in batch.items()}
    tensors |= {f"rng.{key}": value for key, value in rng.items()}
    for name, content in ((TENSORS, tensors), (WEIGHTS, model.state_dict())):
        temporary = folder / f".{name}.{os.getpid()}"
        save_file(separate(content), temporary)
        replace_synced(temporary, folder / name)
    write_json(folder / REPORT, dict(report))


def load_failure(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Returns the batch of a failure, the generators' states (for `set_rng_state`) and its report."""
    if not (folder / REPORT).is_file():
        raise ValueError(f"{folder} holds no saved batch: there is no {REPORT} in it")
    tensors = load_file(folder / TENSORS)
    parts: dict[str, dict[str, Tensor]] = {"batch": {}, "rng": {}}
    for key, value in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = value
    return parts["batch"], parts["rng"], json.loads((folder / REPORT).read_text())
