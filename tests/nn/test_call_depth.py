"""Few functions lie between a model and its kernels: a reader follows a batch to the work that is done on it."""

from typing import Any

import pytest
import torch

from tools.call_depth import SOURCES, chains, encoders

MOST = 9


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("name", encoders())
def test_an_encoder_of_eva_reaches_its_kernels_in_few_calls(name: str, training: bool) -> None:
    model, inputs, options = encoders()[name]
    model.train(training)
    with torch.set_grad_enabled(training):
        found = chains(model, *inputs, **options)
    of_encoder = [chain for chain in found if any("eva.py" in function for function in chain)]
    reached = {chain[-1].partition(":")[0] for chain in of_encoder}
    assert reached == {
        "kernels/window_attention/cpu.py",
        "kernels/chunk_values/cpu.py",
    }  # padded, and fused all the same
    assert max(len(chain) for chain in of_encoder) <= MOST, max(of_encoder, key=len)


def test_levels_are_counted() -> None:
    """One function of the package more in the way is one level more."""
    model, inputs, options = encoders()["text classifier"]
    before = max(len(chain) for chain in chains(model, *inputs, **options))
    encoder: Any = model.encoder
    names: dict[str, Any] = {"forward": encoder.forward}
    source = "def pass_on(*args, **options):\n    return forward(*args, **options)\n"
    exec(compile(source, f"{SOURCES}/pass_on.py", "exec"), names)
    encoder.forward = names["pass_on"]
    assert max(len(chain) for chain in chains(model, *inputs, **options)) == before + 1
