"""Initial weights that depend on the seed and on their own names only.

If all weights came from one stream of random numbers, a mechanism that draws one number more would shift everything
after it, and a seed would mean nothing across mechanisms. Here every draw into a parameter or a buffer has a seed of
its own, made of the model's seed and the tensor's name. So two models with the same seed begin with the same values
wherever name, shape and kind of initialisation are the same, which lets a comparison block its differences by seed.

Modules initialise themselves while they are built, before they have a name in the model. A model is therefore built
twice: the first time shows into which tensor each draw goes, the second time each draw gets its seed. This needs
nothing from the modules, so it also holds for mechanisms of other packages.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.models.base import Model, build_from_config


class _Draws(TorchDispatchMode):
    """Keeps what torch's generator draws, and seeds the generator before each draw if seeds are given."""

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        super().__init__()
        self.seeds, self.drawn = seeds, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if len(self.drawn) < len(self.seeds):  # a mechanism that draws until it likes the result may go on drawing
            torch.default_generator.manual_seed(self.seeds[len(self.drawn)])
        result = func(*args, **kwargs)
        self.drawn.append(result.detach())  # which also keeps its storage from being another tensor's
        return result


def build_seeded(options: Mapping[str, Any], seed: int) -> Model:
    """Builds the model of a complete config with the initial weights of a seed; torch's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with _Draws() as first:
            names = _draw_names(build_from_config(options), first.drawn)
        first.drawn.clear()
        with _Draws([_hash(seed, name) for name in names]):
            return build_from_config(options)


def _draw_names(model: nn.Module, drawn: Sequence[Tensor]) -> list[str]:
    """A name for every draw, all different.

    Draws into the same place of a tensor are counted from the last, whose values stay: earlier ones, such as those of
    nn.Linear itself, do not count. What is no tensor of the model, such as the noise before an orthogonalisation, is
    named after the tensor that was drawn before it.
    """
    tensors = {_storage(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    places, last = [], ""
    for tensor in drawn:
        name = tensors.get(_storage(tensor))
        places.append(f"{last}/after" if name is None else f"{name}/{tensor.storage_offset()}")
        last = name or last
    left, names = Counter(places), []
    for place in places:
        left[place] -= 1
        names.append(f"{place}/{left[place]}")
    return names


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _hash(seed: int, name: str) -> int:
    """Python's own hash differs from process to process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
