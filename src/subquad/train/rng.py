"""The states of all random generators, as tensors, so that a resumed run draws what it would have drawn."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seeds torch's, numpy's and Python's generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def torch_rng_state() -> dict[str, Tensor]:
    """Returns the states of torch's generators, on the CPU and on the GPU of this process.

    It is quick enough for every batch, and waits for no GPU, whose generators count on the CPU.
    """
    saved = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        saved["cuda"] = torch.cuda.get_rng_state()
    return saved


def rng_state() -> dict[str, Tensor]:
    """Returns the states of torch's generators (`torch_rng_state`), of numpy's and of Python's, as tensors."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    return torch_rng_state() | {
        "numpy.keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy.position": torch.tensor([int(position), int(has_gauss)]),
        "numpy.gauss": torch.tensor(float(gauss), dtype=torch.float64),
        "python.words": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }


def set_rng_state(saved: Mapping[str, Tensor]) -> None:
    """Restores what `rng_state` returned. Generators that `saved` leaves out stay as they are."""
    if "torch" in saved:
        torch.set_rng_state(saved["torch"])
    if "numpy.keys" in saved:
        position, has_gauss = saved["numpy.position"].tolist()
        keys = saved["numpy.keys"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, position, has_gauss, saved["numpy.gauss"].item()))
    if "python.words" in saved:
        version, *words = saved["python.words"].tolist()
        gauss = saved["python.gauss"].tolist()
        random.setstate((version, tuple(words), gauss[0] if gauss else None))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
