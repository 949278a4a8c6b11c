"""Swapped models of transformers in files: `save_pretrained` writes the swap with the config, `load_swapped` reads it.

    subquad.swap(model, "eva", window=64)
    model.save_pretrained("bert-eva")                    # after fine-tuning, or at once; also by transformers' Trainer
    model = subquad.load_swapped("bert-eva")

The config of a swapped model has `subquad_swap`, a list of swaps, and `attn_implementation: subquad_swap`, which
transformers' own `from_pretrained` refuses: it would load another model, with the attention from before the swap.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from subquad.interop.patching.host import ATTENTION_NAME, SwappedAttention, require_transformers

SWAPS, IMPLEMENTATION = "subquad_swap", "attn_implementation"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_into_config(model: nn.Module, swap: dict[str, Any]) -> Callable[[], None] | None:
    """Adds a swap to the config of a transformers model. Returns what takes it out again; None: there is no config."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return None
    setattr(config, SWAPS, [*getattr(config, SWAPS, []), swap])
    setattr(config, IMPLEMENTATION, ATTENTION_NAME)
    return partial(_take_out, config, swap)


def _take_out(config: Any, swap: dict[str, Any]) -> None:
    rest = [other for other in getattr(config, SWAPS) if other is not swap]
    if rest:
        setattr(config, SWAPS, rest)
    else:
        delattr(config, SWAPS)
        delattr(config, IMPLEMENTATION)


def load_swapped(folder: str | Path, **options: Any) -> Any:
    """Loads a swapped model that `save_pretrained` wrote into a folder, with the class that it had.

    options: those of transformers' `from_pretrained`, such as dtype. The model is in evaluation mode.
    """
    from subquad.interop.patching.swap import swap

    transformers = require_transformers("a swapped model")
    folder = Path(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    swaps = getattr(config, SWAPS, None)
    if swaps is None:
        raise ValueError(f"{folder} holds no swapped model; load it with transformers' from_pretrained")
    delattr(config, SWAPS)
    config._attn_implementation = None  # the default, for layers that were not swapped
    with _without_report(transformers):  # weights of mixers are unexpected before the swap
        model = getattr(transformers, config.architectures[0]).from_pretrained(folder, config=config, **options)
    for found in swaps:
        report = swap(model, found["mixer"], layers=found["layers"], **found["options"])
        if [layer.number for layer in report.replaced] != found["layers"]:
            raise ValueError(f"{folder}: its model was swapped in part of a larger one, which has other layer numbers")
    _load_mixers(model, folder)
    return model.eval()


def _load_mixers(model: Any, folder: Path) -> None:
    """Loads the weights of all mixers from the files of the model."""
    modules = {path: part for path, part in model.named_modules() if isinstance(part, SwappedAttention)}
    own = {f"{path}.{name}": value for path, part in modules.items() for name, value in part.state_dict().items()}
    saved_as = _names_in_files(model, own)
    found: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        with safe_open(file, "pt") as tensors:
            found |= {saved_as[name]: tensors.get_tensor(name) for name in tensors.keys() if name in saved_as}  # noqa: SIM118 - the file is no dict
    for path, module in modules.items():
        start = f"{path}."
        module.load_state_dict({name.removeprefix(start): found[name] for name in found if name.startswith(start)})


def _names_in_files(model: Any, own: dict[str, Tensor]) -> dict[str, str]:
    """The names of weights by those that they may have in files, where transformers writes some models' older names."""
    from transformers.core_model_loading import revert_weight_conversion

    names = {name: name for name in own}
    for name, value in own.items():
        names |= dict.fromkeys(revert_weight_conversion(model, {name: value}), name)
    return names


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return [folder / WEIGHTS]


@contextmanager
def _without_report(transformers: Any) -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
