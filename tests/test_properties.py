"""What every mechanism promises, over random shapes, masks and chunkings; being registered is being tested."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.mixers import Mixer, available, noise
from tests.mixer_cases import (
    BIDIRECTIONAL,
    CAUSAL,
    CROSS,
    DIM,
    EVERY,
    GRID,
    STREAMING,
    Case,
    close,
    grid_options,
    tokens,
)

# Reproducible: a rare rounding accident (a signed normaliser near 0) should not stop somebody else's change.
many = settings(max_examples=300, deadline=None, derandomize=True)
lengths = st.integers(1, 33)
seeds = st.integers(0, 2**16)


@st.composite
def paddings(draw: Any, batch: int, time: int) -> Tensor:
    """Left, right, interior or scattered padding, also whole rows."""
    rows = []
    for _ in range(batch):
        kind = draw(st.sampled_from(["none", "left", "right", "inside", "scattered", "all"]))
        row = torch.zeros(time, dtype=torch.bool)
        first = draw(st.integers(0, time - 1))
        last = draw(st.integers(first, time - 1))
        if kind == "left":
            row[:last] = True
        elif kind == "right":
            row[first:] = True
        elif kind == "inside":
            row[first:last] = True
        elif kind == "scattered":
            row[:] = torch.rand(time, generator=torch.Generator().manual_seed(draw(seeds))) < 0.5
        elif kind == "all":
            row[:] = True
        rows.append(row)
    return torch.stack(rows)


def alone(mixer: Mixer, x: Tensor, padding: Tensor, row: int, **call: Any) -> Tensor:
    return mixer(x[row : row + 1, ~padding[row]], **call).y[0]


@many
@given(st.sampled_from(CAUSAL), lengths, seeds, st.data())
def test_the_future_never_reaches_the_past(case: Case, time: int, seed: int, data: Any) -> None:
    mixer, x = case.build(seed), tokens(2, time, seed)
    cut = data.draw(st.integers(0, time))
    other = torch.cat([x[:, :cut], 3 * tokens(2, time - cut, seed + 1)], 1)
    assert torch.equal(mixer(x).y[:, :cut], mixer(other).y[:, :cut])


@many
@given(st.sampled_from(EVERY), lengths, seeds, st.data())
def test_padding_and_company_change_nothing(case: Case, time: int, seed: int, data: Any) -> None:
    batch = data.draw(st.integers(1, 4))
    mixer, x, padding = case.build(seed), tokens(batch, time, seed), data.draw(paddings(batch, time))
    x[padding] = float("nan")  # what padded positions hold must not matter
    y = mixer(x, padding=padding).y
    assert torch.isfinite(y).all()
    for row in range(batch):
        if not padding[row].all():
            assert close(y[row, ~padding[row]], alone(mixer, x, padding, row))


@many
@given(st.sampled_from(GRID), st.integers(1, 9), st.integers(1, 9), seeds, st.data())
def test_padded_cells_of_a_grid_contribute_nothing(case: Case, rows: int, columns: int, seed: int, data: Any) -> None:
    mixer, x = case.build(seed, **grid_options(case)) if grid_buildable(case) else None, tokens(2, rows * columns, seed)
    if mixer is None:
        return
    padding = data.draw(paddings(2, rows * columns))
    y = mixer(x, padding=padding, grid=(rows, columns)).y
    other = torch.where(padding[..., None], 50 * tokens(2, rows * columns, seed + 1), x)
    assert torch.isfinite(y).all()
    assert torch.equal(y, mixer(other, padding=padding, grid=(rows, columns)).y)
    first = mixer(x[:1], padding=padding[:1], grid=(rows, columns)).y[0]
    assert close(y[0], first)  # company in the batch


def grid_buildable(case: Case) -> bool:
    return case.options.get("form") != "decoder"


@many
@given(st.sampled_from(STREAMING), lengths, seeds, st.data())
def test_streaming_in_chunks_equals_one_pass(case: Case, time: int, seed: int, data: Any) -> None:
    mixer, x = case.build(seed), tokens(2, time, seed)
    padding = data.draw(st.one_of(st.none(), paddings(2, time)))
    state, outputs, begin = mixer.init_state(2), [], 0
    while begin < time:
        end = begin + data.draw(st.integers(1, time - begin))
        part = None if padding is None else padding[:, begin:end]
        mixed = mixer(x[:, begin:end], padding=part, state=state)
        outputs.append(mixed.y)
        state, begin = mixed.state, end
    expected = mixer(x, padding=padding).y
    assert close(torch.cat(outputs, 1), expected)
    assert state is not None
    assert state.lengths.tolist() == [time if padding is None else int((~padding[row]).sum()) for row in range(2)]


@many
@given(st.sampled_from(STREAMING), st.integers(1, 20), st.integers(1, 12), seeds, st.data())
def test_reordering_states_equals_reordering_inputs(case: Case, before: int, after: int, seed: int, data: Any) -> None:
    mixer, x = case.build(seed), tokens(3, before, seed)
    index = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)))
    padding = data.draw(paddings(3, before))
    state = mixer(x, padding=padding, state=mixer.init_state(3)).state
    assert state is not None
    more = tokens(len(index), after, seed + 1)
    ours = mixer(more, state=state.reorder(index)).y
    straight = mixer(x[index], padding=padding[index], state=mixer.init_state(len(index))).state
    assert close(ours, mixer(more, state=straight).y)


@many
@given(st.sampled_from(CROSS), lengths, st.integers(1, 12), seeds, st.data())
def test_cross_attention_ignores_padding_and_caches_its_context(
    case: Case, context_time: int, time: int, seed: int, data: Any
) -> None:
    mixer, x, context = case.build(seed), tokens(2, time, seed), tokens(2, context_time, seed + 1)
    padding = data.draw(paddings(2, context_time))
    context[padding] = float("nan")
    y = mixer(x, context=context, context_padding=padding).y
    assert torch.isfinite(y).all()
    for row in range(2):
        if not padding[row].all():
            assert close(y[row], mixer(x[row : row + 1], context=context[row : row + 1, ~padding[row]]).y[0])
    first = mixer(x[:, :1], context=context, context_padding=padding, state=mixer.init_state(2))
    assert close(first.y, y[:, :1])
    order = torch.tensor([1, 0])
    for step in range(1, time):
        assert first.state is not None
        swapped = mixer(x[order, step : step + 1], state=first.state.reorder(order)).y
        assert close(swapped[order], y[:, step : step + 1])


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_short_lengths_and_padded_rows_are_finite(case: Case) -> None:
    mixer = case.build()
    for time in (1, 2, 3, 7):
        x = tokens(2, time, time).requires_grad_()
        padding = torch.tensor([[True] * time, [False] * time])
        mixed = mixer(x, padding=padding)
        mixed.y.sum().backward()
        assert mixed.y.shape == x.shape
        assert torch.isfinite(mixed.y).all()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert (x.grad[0] == 0).all()  # nothing flows into padding


@pytest.mark.parametrize("case", EVERY, ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gradients_in_float64(case: Case, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gradcheck of input and parameters; draws and stabilising maxima come from one pass, as constants."""
    mixer = case.build(dtype=torch.float64).train(training)
    if any(option.endswith("dropout") and value for option, value in mixer.config.model_dump().items()):
        mixer.eval()  # dropout draws from the generator, which gradcheck cannot hold still
    x = tokens(1, 7, 1).double().requires_grad_()
    stored: list[Tensor] = []

    def record(value: Tensor) -> Tensor:
        stored.append(value.detach())
        return stored[-1]

    monkeypatch.setattr(noise, "constant", record)
    with noise.drawing_from(lambda kind, like, shape: record(noise.from_generator(kind, like, shape))):
        mixer(x)

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        replayed = iter(stored)
        monkeypatch.setattr(noise, "constant", lambda value: next(replayed))
        with noise.drawing_from(lambda kind, like, shape: next(replayed)):
            mixed = torch.func.functional_call(mixer, dict(zip(names, parameters, strict=True)), (x,))
        return (mixed.y,) if mixed.aux is None else (mixed.y, mixed.aux)

    names = [name for name, parameter in mixer.named_parameters() if parameter.requires_grad]
    parameters = [p for p in mixer.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_bfloat16_stays_near_float32(case: Case) -> None:
    """With weights of ordinary size: rounding the inputs of logits of 20 and more moves any softmax that far."""
    mixer = case.build()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.mul_(0.5)
    half = case.build(dtype=torch.bfloat16)
    half.load_state_dict(mixer.state_dict())
    mixer.load_state_dict(half.state_dict())  # both compute with the rounded weights
    x = tokens(2, 29, 3).bfloat16()
    exact, rounded = mixer(x.float()).y, half(x).y
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_autocast_stays_near_float32(case: Case) -> None:
    mixer, x = case.build(), tokens(2, 29, 3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.mul_(0.5)
    exact = mixer(x).y
    with torch.autocast("cpu", torch.bfloat16):
        rounded = mixer(x).y
    assert (rounded.float() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_memory_saved_for_backward_is_linear(case: Case) -> None:
    mixer = case.build()
    if not mixer.capabilities.linear or (case.name == "eva" and case.causal):
        pytest.skip("quadratic by definition")
    if getattr(mixer.config, "form", None) == "decoder":
        pytest.skip("decoder form: summaries of T / r chunks for every query")
    if getattr(mixer.config, "chunk_size", None):
        pytest.skip("a fixed chunk size makes T / r chunks for every query")
    short, long = saved_bytes(mixer, 128), saved_bytes(mixer, 512)
    assert long <= 4.4 * short


def saved_bytes(mixer: Mixer, time: int) -> int:
    """Bytes of distinct storages that a training pass keeps for its backward."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = tokens(1, time, 0, DIM).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mixer.train()(x).y
    assert y.requires_grad
    own = {p.untyped_storage().data_ptr() for p in mixer.state_dict().values()}
    return sum(size for pointer, size in storages.items() if pointer not in own)


def test_every_mechanism_has_cases() -> None:
    assert {case.name for case in BIDIRECTIONAL} == set(available())
