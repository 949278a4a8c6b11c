"""Swapped models of transformers in files: `save_pretrained` writes the swap with the config.

    subquad.swap(model, "eva", window=64)
    model.save_pretrained("bert-eva")                    # after fine-tuning, or at once; also by transformers' Trainer
    model = subquad.load_swapped("bert-eva")

transformers' own `from_pretrained` loads such a folder too (see swapped_classes.py).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from subquad.packages import require_transformers

WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
"""Options of transformers' `from_pretrained` that say where files are."""


def write_into_config(model: nn.Module, swap: dict[str, Any]) -> Callable[[], None] | None:
    """Adds a swap to the config of a transformers model. Returns what takes it out again; None: there is no config."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return None
    from subquad.interop.patching.swapped_classes import SWAPS, swapped_config_class

    if not hasattr(config, SWAPS):
        host: Any = type(config)
        config.__class__ = swapped_config_class(host)
    setattr(config, SWAPS, [*getattr(config, SWAPS, []), swap])
    return partial(_take_out, config, swap)


def _take_out(config: Any, swap: dict[str, Any]) -> None:
    from subquad.interop.patching.swapped_classes import SWAPS

    rest = [other for other in getattr(config, SWAPS) if other is not swap]
    if rest:
        setattr(config, SWAPS, rest)
    else:
        delattr(config, SWAPS)
        config.__class__ = config.host


def load_swapped(name: str | Path, **options: Any) -> Any:
    """Loads a swapped model that `save_pretrained` wrote, with the class that it had.

    name: a folder, or the name of a repository of the Hugging Face Hub. options: those of transformers'
    `from_pretrained`, such as dtype or revision. The model is in evaluation mode.
    """
    transformers = require_transformers("a swapped model")
    from subquad.interop.patching.swapped_classes import SWAPS, swapped_model_class

    where = {option: options[option] for option in WHERE if option in options}
    config = transformers.AutoConfig.from_pretrained(name, **where)
    if not hasattr(config, SWAPS):
        raise ValueError(f"{name} holds no swapped model; load it with transformers' from_pretrained")
    kind = swapped_model_class(getattr(transformers, config.architectures[0]))
    return kind.from_pretrained(name, config=config, **options)
