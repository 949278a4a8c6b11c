"""Streaming inside autocast: chunks agree with one pass, with padding, after reordering, and in whole models."""

from typing import Any

import pytest
import torch

from subquad.mixers.state import append_at
from subquad.testing import first_case, tokens
from tests.models.cases import able
from tests.models.test_models import language_model, words

HALF = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of outputs around 1: a few roundings to 8 or 11 bits."""


def test_a_state_made_inside_autocast_takes_half_the_memory() -> None:
    mixer: Any = first_case("softmax", causal=True).build()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = mixer(tokens(2, 5, 0), state=mixer.init_state(2)).state
        assert state.k.dtype == torch.bfloat16
        assert mixer.init_state(2, dtype=torch.float32).k.dtype == torch.float32
    assert mixer.init_state(2).k.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert mixer.double().init_state(2).k.dtype == torch.float64  # autocast leaves float64 alone


def test_entries_do_not_lose_precision_when_they_are_appended() -> None:
    buffer, entries = torch.zeros(1, 1, 0, 1, dtype=torch.bfloat16), torch.full((1, 1, 1, 1), 1 / 3)
    appended = append_at(buffer, entries, torch.tensor([0]), torch.tensor([[True]]), 1)
    assert torch.equal(appended, entries)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("mechanism", able("decoder"))
def test_whole_models_stream(mechanism: str, dtype: torch.dtype) -> None:
    model, lengths = language_model(mechanism), [3, 7, 5]
    prompts, following = words(3, 7), words(3, 2, seed=1)
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]
    with torch.no_grad(), torch.autocast("cpu", dtype):
        state = model(prompts, padding=padding, state=model.init_state(3)).state
        last = model(following, state=state).logits
        for row, length in enumerate(lengths):
            alone = model(torch.cat([prompts[row, :length], following[row]])[None]).logits[0, -2:]
            torch.testing.assert_close(last[row].float(), alone.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
