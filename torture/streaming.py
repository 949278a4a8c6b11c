"""A hundred thousand tokens, read one by one: what is computed drifts no further than stated, and states do not grow.

Every causal mechanism that streams reads random tokens in float32. What it should have said is computed in float64:
at once where memory is linear in the length, and elsewhere in pieces.
"""

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from benchmarks.measured import Result
from subquad.mixers import State, available
from subquad.testing.cases import Case, cases, keeps_linear_memory, streams

TITLES = {"streaming": "the largest error of an output, in millionths of the largest output"}
PIECE = 1000
SHORT = 50
"""Tokens that look back at all others at once: a hundred thousand keys are megabytes for each of them."""
MOST = 100.0
"""Millionths, which float32 may be off by."""
ALL_KEYS = "O(T)"
GROWING = (ALL_KEYS, "summaries")
"""What capabilities say of states that grow with the sequence."""
EVA = Case.of("eva", {"window": 64, "chunk_size": 64}, causal=True)
"""Chunks as long as they are in use: a state has a summary of each."""


def drift(steps: int) -> Iterator[Result]:
    """One line for the first option set of every mechanism. Where a step reads all keys, there are fewer of them."""
    for name in available():
        case = EVA if name == "eva" else next((case for case in cases(name) if streams(case)), None)
        if case is not None:
            reads_all = ALL_KEYS in case.build().capabilities.state
            yield _drift_of(case, steps // 5 if reads_all else steps)


@torch.inference_mode()
def _drift_of(case: Case, steps: int) -> Result:
    x, mixer = case.tokens(1, steps), case.build()
    state, sizes = mixer.init_state(1), []
    outputs = torch.empty_like(x)  # small tensors that stay, between states that grow, would leave holes in memory
    for step in range(steps):
        mixed = mixer(x[:, step : step + 1], state=state)
        assert mixed.state is not None
        state = mixed.state
        outputs[:, step] = mixed.y[:, 0]
        if step + 1 in (min(PIECE, steps // 2), steps):
            sizes.append(state_bytes(state))
    expected = _expected(case, x)
    errors = 1e6 * (outputs.double() - expected).abs().amax((0, 2)) / expected.abs().max()
    piece = min(PIECE, steps // 2)
    numbers = {
        "steps": steps,
        f"error of the first {piece:,}": float(errors[:piece].max()),
        f"error of the last {piece:,}": float(errors[-piece:].max()),
        "state bytes then": sizes[0],
        "state bytes at the end": sizes[1],
    }
    labels = {"mechanism": str(case)}
    if sizes[1] > sizes[0] and not any(word in mixer.capabilities.state for word in GROWING):
        return Result("streaming", labels, reason=f"its state grew from {sizes[0]:,} to {sizes[1]:,} bytes")
    return Result("streaming", labels, numbers, float(errors.max()), ("at most", MOST))


def _expected(case: Case, x: Tensor) -> Tensor:
    mixer = case.build(torch.float64)
    if keeps_linear_memory(case):
        return mixer(x.double()).y
    state, outputs = mixer.init_state(1), []
    for piece in x.double().split(SHORT, dim=1):
        mixed = mixer(piece, state=state)
        assert mixed.state is not None
        state = mixed.state
        outputs.append(mixed.y)
    return torch.cat(outputs, 1)


def state_bytes(state: State) -> int:
    values = (getattr(state, field.name) for field in fields(state))
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
