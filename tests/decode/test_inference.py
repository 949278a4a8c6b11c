"""Linear maps for few rows, and models made of them: the same numbers, or near ones with weights of a byte."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.decode import inference
from subquad.decode.inference import FastLinear, FastWordHead, prepare_for_inference
from subquad.kernels import dispatch, linear
from subquad.kernels.linear import (
    FEW_ROWS,
    few_rows_linear,
    few_rows_map,
    int8_linear,
    int8_map,
    reference,
    to_int8,
)
from subquad.kernels.linear.reference import largest_input
from subquad.mixers import available, mixer_class
from subquad.models import Model, build_model
from subquad.nn.stack import StackState
from subquad.testing import close, enlarge
from tests.models.cases import OPTIONS, inputs, tiny

INT8_ERROR = 1 / 127
"""Rounding moves a weight by at most half of 1 / 127 of its output's largest weight; inputs hardly at all."""
CAUSAL = [name for name in available() if mixer_class(name).capabilities.causal]
CONSTANT = [name for name in CAUSAL if "O(1)" in mixer_class(name).capabilities.state]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- the kernels

sizes = st.integers(1, 150)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, FEW_ROWS + 2), sizes, sizes, st.booleans(), st.integers(0, 1000))
def test_few_rows_are_a_linear_map(rows: int, width: int, outputs: int, biased: bool, seed: int) -> None:
    x, weight = drawn(seed, rows, width), drawn(seed + 1, outputs, width)
    bias = drawn(seed + 2, outputs) if biased else None
    assert close(few_rows_linear(x, weight, bias), F.linear(x, weight, bias))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 20), sizes, sizes, st.booleans(), st.integers(0, 1000))
def test_int8_kernel_computes_its_definition(rows: int, width: int, outputs: int, biased: bool, seed: int) -> None:
    x, (values, scale) = drawn(seed, rows, width), to_int8(drawn(seed + 1, outputs, width))
    bias = drawn(seed + 2, outputs) if biased else None
    # a value halfway between two integers may be rounded up by one and down by the other
    step = x.abs().amax() / largest_input(width) * scale.amax() * 127
    error = (int8_linear(x, values, scale, bias) - reference.int8_linear_by(values, scale, bias)(x)).abs().max()
    assert error <= 2 * step + 1e-5


def test_rows_of_a_batch_do_not_change_each_other() -> None:
    x, weight = drawn(0, 9, 300), drawn(1, 70, 300)
    values, scale = to_int8(weight)
    for row in range(9):
        assert torch.equal(int8_linear(x, values, scale)[row], int8_linear(x[row], values, scale))
        assert close(few_rows_linear(x, weight)[row], few_rows_linear(x[row], weight), 1e-6)


def test_the_loss_is_in_the_weights() -> None:
    x, weight = drawn(0, 4, 512), drawn(1, 64, 512)
    values, scale = to_int8(weight)
    rounded = values * scale[:, None]
    assert (rounded - weight).abs().le(scale[:, None] * 0.501).all()
    assert close(int8_linear(x, values, scale), F.linear(x, rounded), 2e-4)


def test_sums_of_the_longest_rows_do_not_overflow() -> None:
    width = 5000
    x, (values, scale) = torch.ones(1, width), to_int8(torch.ones(8, width))
    assert largest_input(width) * 127 * width < 2**31
    assert close(int8_linear(x, values, scale), torch.full((1, 8), float(width)))


def test_zeros_stay_zeros() -> None:
    values, scale = to_int8(torch.cat([torch.zeros(3, 64), torch.ones(2, 64)]))
    assert int8_linear(torch.ones(2, 64), values, scale)[:, :3].eq(0).all()
    assert int8_linear(torch.zeros(2, 64), values, scale).eq(0).all()


@pytest.mark.parametrize("x", [drawn(0, 3, 5, 64).double(), drawn(0, 200, 64)], ids=["float64", "many rows"])
def test_other_inputs_take_torchs_product(x: Tensor) -> None:
    weight = drawn(1, 9, 64).to(x.dtype)
    assert torch.equal(few_rows_linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("make", [few_rows_map, int8_map])
def test_maps_take_parts_of_tensors(make: Any) -> None:
    whole, weight = drawn(0, 6, 3, 64), drawn(1, 9, 64)
    for x in (whole[:, -1], whole[::2], whole.transpose(0, 1)):
        with torch.inference_mode():
            assert torch.equal(
                make(weight, None)(x), make(weight, None)(x.clone(memory_format=torch.contiguous_format))
            )


def test_gradients() -> None:
    x, weight = drawn(0, 2, 64).requires_grad_(), drawn(1, 9, 64).requires_grad_()
    few_rows_linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    with pytest.raises(ValueError, match="inference"):
        int8_linear(x, *to_int8(weight))


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    x, weight = drawn(0, 2, 64), drawn(1, 9, 64)
    assert torch.equal(few_rows_linear(x, weight), F.linear(x, weight))
    assert close(int8_linear(x, *to_int8(weight)), F.linear(x, weight), 0.1)


@pytest.mark.parametrize("biased", [False, True])
def test_operations_are_sound(biased: bool) -> None:
    x, weight, bias = drawn(0, 3, 40), drawn(1, 9, 40), drawn(2, 9) if biased else None
    torch.library.opcheck(linear._few_rows_op, (x, weight, bias))
    torch.library.opcheck(linear._int8_op, (x, *to_int8(weight), bias))


# ---------------------------------------------------------------------- models


@pytest.fixture(autouse=True)
def every_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of any size count as large."""
    monkeypatch.setattr(inference, "LEAST_WEIGHTS", 0)


def language_model(mixer: str, **more: Any) -> Model:
    torch.manual_seed(0)
    options = dict(OPTIONS.get(mixer, {}))
    if mixer == "eva":
        options = {"window": 4, "chunk_size": 2}
    stack = {"layers": 2, "heads": 2, "ffn_dim": 48, "mixer": {"name": mixer, **options}}
    model = build_model("language-model", vocab=40, dim=32, decoder=stack, **more)
    enlarge(model)
    return model.eval()


@torch.inference_mode()
def stream(model: Any, tokens: Tensor, state: StackState | None = None) -> tuple[Tensor, StackState]:
    """Logits (batch, time, vocab) of tokens (batch, time), read one by one."""
    state = state or model.init_state(tokens.shape[0])
    logits = []
    for token in tokens.split(1, 1):
        found = model(token, state=state)
        logits.append(found.logits)
        state = found.state
    return torch.cat(logits, 1), state


def some_tokens(batch: int, time: int) -> Tensor:
    return torch.randint(2, 40, (batch, time), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("mixer", CAUSAL)
def test_float32_is_the_same_model(mixer: str, batch: int) -> None:
    model, tokens = language_model(mixer), some_tokens(batch, 11)
    ours = prepare_for_inference(model, "float32")
    assert any(type(module) is FastLinear for module in ours.modules())
    assert type(ours.get_submodule("head")) is FastWordHead
    assert close(stream(ours, tokens)[0], stream(model, tokens)[0])
    with torch.inference_mode():
        assert close(ours(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_int8_is_near(mixer: str) -> None:
    """Of a map: at most what rounding allows. Of a model whose weights were rounded before: nothing but inputs."""
    model, tokens = language_model(mixer), some_tokens(3, 11)
    ours = prepare_for_inference(model, "int8")
    with torch.no_grad():
        for module in ours.modules():  # their weights are the model's
            if isinstance(module, FastLinear | FastWordHead):
                weight = module.weight
                values, scale = to_int8(weight)
                rounded = values * scale[:, None]
                assert ((rounded - weight).abs() <= INT8_ERROR * weight.abs().amax()).all()
                weight.copy_(rounded)
    exact, near = stream(model, tokens)[0], stream(prepare_for_inference(model, "int8"), tokens)[0]
    assert (near - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("mixer", CAUSAL)
def test_bfloat16_is_near(mixer: str) -> None:
    model, tokens = language_model(mixer), some_tokens(3, 11)
    ours = prepare_for_inference(model, "bfloat16")
    logits, state = stream(ours, tokens)
    exact = stream(model, tokens)[0]
    assert {one.dtype for one in ours.parameters()} == {torch.bfloat16}
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert all(
        one.dtype in (torch.bfloat16, torch.int64) or mixer in ("performer", "primal") for one in state.tensors()
    )
    assert (logits.float() - exact).norm() <= 0.05 * exact.norm()


def test_weights_are_shared_and_the_model_is_left_alone() -> None:
    model = language_model("softmax").train()
    before = {name: type(module) for name, module in model.named_modules()}
    for weights in ("float32", "int8"):
        ours = prepare_for_inference(model, weights)
        assert not ours.training
        assert {id(one) for one in ours.parameters()} == {id(one) for one in model.parameters()}
        assert ours.state_dict().keys() == model.state_dict().keys()
    assert model.training
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_small_maps_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "LEAST_WEIGHTS", 1 << 16)
    assert all(
        type(module) is not FastLinear for module in prepare_for_inference(language_model("eva"), "float32").modules()
    )


class SoftmaxCalls(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "softmax" in str(function)
        return function(*args, **(kwargs or {}))


def test_filters_are_normalised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax over lightconv's filters depends on weights alone: no step computes it, and not a bit changes."""
    monkeypatch.setattr(inference, "LEAST_WEIGHTS", 1 << 30)  # linear maps stay as they are
    model, tokens = language_model("lightconv"), some_tokens(3, 5)
    ours = prepare_for_inference(model, "float32")
    with SoftmaxCalls() as before:
        expected = stream(model, tokens)[0]
    with SoftmaxCalls() as after:
        found = stream(ours, tokens)[0]
    assert (before.count, after.count) == (2 * 5, 0)
    assert torch.equal(found, expected)
    with torch.inference_mode():
        assert torch.equal(ours(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("head", [{"tied": True}, {"tied": True, "bias": True}, {"tied": False}])
def test_heads(head: dict[str, Any]) -> None:
    model, tokens = language_model("lightconv", head=head), some_tokens(2, 5)
    exact = stream(model, tokens)[0]
    assert close(stream(prepare_for_inference(model, "float32"), tokens)[0], exact)
    ours = prepare_for_inference(model, "int8")
    assert type(ours.get_submodule("head")) is FastWordHead
    assert (stream(ours, tokens)[0] - exact).norm() <= 0.05 * exact.norm()


def test_adaptive_heads_stay() -> None:
    model = tiny("transformer_lm_wiki103").eval()
    ours = prepare_for_inference(model, "float32")
    assert type(ours.get_submodule("head")) is type(model.get_submodule("head"))
    with torch.inference_mode():
        assert close(ours(*inputs(ours)).logits, model(*inputs(model)).logits)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_translation(weights: Any) -> None:
    model = tiny("lightconv_iwslt_de_en").eval()
    enlarge(model)
    ours = prepare_for_inference(model, weights)
    with torch.inference_mode():
        exact, near = model(*inputs(model)).logits, ours(*inputs(model)).logits
    assert (near - exact).norm() <= (1e-5 if weights == "float32" else 0.05) * exact.norm()


@pytest.mark.parametrize("mixer", CAUSAL)
def test_rows_move_with_their_states(mixer: str) -> None:
    ours, index = prepare_for_inference(language_model(mixer), "float32"), torch.tensor([2, 0, 0])
    first, then = some_tokens(3, 6), some_tokens(3, 4)
    moved = stream(ours, then, stream(ours, first)[1].reorder(index))[0]
    assert close(moved, stream(ours, torch.cat([first[index], then], 1))[0][:, 6:])


@pytest.mark.parametrize("mixer", CONSTANT)
def test_states_of_constant_size_stay_so(mixer: str) -> None:
    """Also what their tensors are cut from: a long prompt is not kept alive."""
    model: Any = language_model(mixer)
    with torch.inference_mode():
        short = stream(model, some_tokens(1, 9))[1]
        long = model(some_tokens(1, 400), state=model.init_state(1)).state
        assert held(stream(model, some_tokens(1, 3), long)[1]) == held(short)
        assert held(long) <= held(short)


def held(state: StackState) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in state.tensors()}
    return sum(storages.values())


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_compiles_in_one_graph(weights: Any) -> None:
    ours: Any = prepare_for_inference(language_model("lightconv"), weights)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    tokens = some_tokens(2, 1)
    with torch.inference_mode():
        state = ours(some_tokens(2, 3), state=ours.init_state(2)).state
        assert close(compiled(tokens, state=state).logits, ours(tokens, state=state).logits)


def test_a_map_of_its_own_kind_is_not_replaced() -> None:
    class Own(nn.Linear):
        pass

    model: Any = language_model("softmax")
    model.decoder.blocks[0].ffn.fc1 = Own(32, 48)
    assert type(prepare_for_inference(model, "int8").decoder.blocks[0].ffn.fc1) is Own
