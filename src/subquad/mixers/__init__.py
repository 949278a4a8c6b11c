"""Token mixing behind one contract. `build("eva", dim=512, heads=8)` or `subquad.mixers.EVA(dim=512, heads=8)`."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from subquad.kernels.precision import at_least_float32, full_precision
from subquad.mixers.base import Capabilities, Mixer, MixerConfig, MixerOutput
from subquad.mixers.layout import Layout, right_padded
from subquad.mixers.registry import _REGISTRY, available, build, load_plugin, mixer_class, register
from subquad.mixers.state import CrossState, State, advanced, fresh_lengths

# Every file of this folder is imported, so a mechanism registers itself by being there.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_CLASSES = {mixer.__name__: mixer for _, mixer in sorted(_REGISTRY.items())}
globals().update(_CLASSES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "Capabilities",
    "CrossState",
    "Layout",
    "MixerOutput",
    "Mixer",
    "MixerConfig",
    "State",
    "advanced",
    "at_least_float32",
    "available",
    "build",
    "fresh_lengths",
    "full_precision",
    "load_plugin",
    "mixer_class",
    "register",
    "right_padded",
    *_CLASSES,
]
