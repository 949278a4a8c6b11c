"""The two convolutions: against loops written out by hand, against each other, and their fairseq names."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.interop.checkpoints.fairseq import convolutions as fairseq
from subquad.kernels.conv import tap_conv, tap_conv_extended
from subquad.mixers import Layout, build
from subquad.models.costs import forward_flops

KERNELS = (1, 2, 3, 4, 7)


def test_the_work_of_very_many_taps_is_counted_without_going_through_them():
    taps = 100_000
    with torch.device("meta"):
        x, weights = torch.empty(2, 8, 6), torch.empty(3, taps)
    assert forward_flops(lambda: tap_conv(x, weights, 0)) == 2 * x.numel() * taps
    assert forward_flops(lambda: tap_conv(x, weights, 0, softmax=True)) == 2 * x.numel() * taps


def make(name: str, **options: Any) -> Any:
    """A mixer whose parts a test may take by name."""
    return build(name, **options)


def before_of(kernel: int, causal: bool) -> int:
    """As the papers' models choose it, written in their way."""
    if causal:
        return kernel - 1
    return kernel // 2 if kernel % 2 else (kernel - 1) // 2


def naive(x: Tensor, taps: Tensor, before: int) -> Tensor:
    """The definition, one product at a time. x: (batch, time, channels); taps: (batch, time, heads, K)."""
    batch, time, channels = x.shape
    out = torch.zeros_like(x)
    for b in range(batch):
        for t in range(time):
            for c in range(channels):
                for k in range(taps.shape[-1]):
                    source = t - before + k
                    if 0 <= source < time:
                        out[b, t, c] += taps[b, t, c * taps.shape[2] // channels, k] * x[b, source, c]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("time", [1, 3, 6])
def test_kernel_equals_the_definition(time, kernel, causal):
    x = torch.randn(2, time, 6, dtype=torch.float64)
    before = before_of(kernel, causal)
    own = torch.randn(2, time, 3, kernel, dtype=torch.float64)
    shared = torch.randn(3, kernel, dtype=torch.float64)
    torch.testing.assert_close(tap_conv(x, own, before), naive(x, own, before))
    torch.testing.assert_close(tap_conv(x, shared, before), naive(x, shared.expand(2, time, -1, -1), before))


@pytest.mark.parametrize("shared", [True, False])
def test_gradients(shared):
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    shape = (2, 3) if shared else (2, 5, 2, 3)
    taps = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, taps: tap_conv(x, taps, 1), (x, taps))


@pytest.mark.parametrize("shared", [True, False])
def test_an_input_that_carries_its_past(shared):
    x, kernel = torch.randn(2, 9, 4), 4
    taps = torch.randn(2, kernel) if shared else torch.randn(2, 9, 2, kernel)
    whole = tap_conv(x, taps, kernel - 1)
    part = tap_conv_extended(x[:, 5 - (kernel - 1) :], taps if shared else taps[:, 5:])
    torch.testing.assert_close(part, whole[:, 5:])


@pytest.mark.parametrize("shared", [True, False])
def test_backward_keeps_no_copies_of_the_input(shared):
    x = torch.randn(2, 64, 32, requires_grad=True)
    taps = torch.randn((2, 15) if shared else (2, 64, 2, 15), requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tap_conv(x, taps, 7)
    assert kept == {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in (x, taps)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", [3, 4, 9])
@pytest.mark.parametrize("name", ["lightconv", "dynamicconv"])
def test_block_equals_the_definition(name, kernel, causal):
    torch.manual_seed(0)
    mixer = make(name, dim=6, heads=2, causal=causal, kernel_size=kernel, conv_dim=4, conv_bias=True).double()
    torch.nn.init.normal_(mixer.conv_bias)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    value, gate = F.linear(x, mixer.in_proj.weight, mixer.in_proj.bias).split(4, -1)
    u = value * torch.sigmoid(gate)
    logits = mixer.filters.expand(2, 5, 2, kernel) if name == "lightconv" else mixer.tap_map(u).view(2, 5, 2, kernel)
    conv = naive(u, logits.softmax(-1), before_of(kernel, causal)) + mixer.conv_bias  # the softmax sees lost taps too
    torch.testing.assert_close(mixer(x).y, F.linear(conv, mixer.out_proj.weight, mixer.out_proj.bias))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
def test_dynamicconv_with_constant_taps_is_lightconv(causal, softmax):
    options = {"dim": 8, "heads": 2, "causal": causal, "kernel_size": 5, "tap_softmax": softmax}
    light, dynamic = make("lightconv", **options), make("dynamicconv", **options, tap_bias=True)
    shared = {key: value for key, value in light.state_dict().items() if key != "filters"}
    constant = {"tap_map.weight": torch.zeros(10, 8), "tap_map.bias": light.filters.flatten()}
    dynamic.load_state_dict(shared | constant)
    x, padding = torch.randn(2, 11, 8), torch.rand(2, 11) < 0.3
    torch.testing.assert_close(light(x, padding=padding).y, dynamic(x, padding=padding).y, atol=1e-6, rtol=1e-5)


def test_taps_from_a_query():
    mixer = make("dynamicconv", dim=4, heads=2, causal=True, kernel_size=3, projected=False, glu=False)
    u, query = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    taps = mixer.tap_map(query).view(2, 6, 2, 3).softmax(-1)
    whole = mixer.convolve(u, Layout(), query)
    torch.testing.assert_close(whole, naive(u, taps, 2))
    state, chunks = mixer.init_state(2), []
    for part in (slice(0, 1), slice(1, 5), slice(5, 6)):
        new = torch.full((2,), part.stop - part.start)
        y, state = mixer.convolve_step(u[:, part], new, state, query[:, part])
        chunks.append(y)
    torch.testing.assert_close(torch.cat(chunks, 1), whole)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", [4, 9])
def test_renormalised_taps_sum_to_one_inside_each_row(kernel, causal):
    mixer = make(
        "dynamicconv", dim=4, heads=2, causal=causal, kernel_size=kernel, projected=False, glu=False, renormalise=True
    )
    before = before_of(kernel, causal)
    x, lengths = torch.randn(3, 6, 4), (6, 1, 4)
    padding = torch.arange(6) >= torch.tensor(lengths)[:, None]
    x.requires_grad_()
    y = mixer(x, padding=padding).y
    for row, length in enumerate(lengths):
        logits = mixer.tap_map(x[row, :length]).view(length, 2, kernel)
        source = torch.arange(length)[:, None] - before + torch.arange(kernel)
        inside = (source >= 0) & (source < length)
        weights = logits.exp() * inside[:, None]
        taps = weights / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(y[row, :length], naive(x[None, row, :length], taps[None], before)[0])
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("options", [{}, {"renormalise": True}])
def test_ragged_stream(options):
    mixer = make("dynamicconv", dim=8, heads=2, causal=True, kernel_size=5, **options)
    x, padding = torch.randn(3, 13, 8), torch.rand(3, 13) < 0.4
    padding[0], padding[1, :6] = False, True  # one row begins only with the second chunk
    whole, state, chunks = mixer(x, padding=padding).y, mixer.init_state(3), []
    for part, pads in zip(x.split(4, 1), padding.split(4, 1), strict=True):
        y, state, _ = mixer(part, padding=pads, state=state)
        chunks.append(y)
    torch.testing.assert_close(torch.cat(chunks, 1), whole, atol=1e-6, rtol=1e-5)
    assert state.lengths.tolist() == (~padding).sum(1).tolist()


@pytest.mark.parametrize("name", ["lightconv", "dynamicconv"])
def test_tap_dropout(name):
    torch.manual_seed(0)
    rate, shape = 0.25, (8, 500, 4, 3)
    mixer = make(name, dim=8, heads=4, kernel_size=3, projected=False, glu=False, tap_dropout=rate)
    x = torch.zeros(8, 500, 8)  # so that dynamicconv predicts the same taps everywhere
    start, end = torch.zeros(8, dtype=torch.int64), torch.full((8,), 500)
    clean = mixer.eval().taps(x, start, end).detach()
    taps = mixer.train().taps(x, start, end).detach()
    assert taps.shape == shape
    dropped = taps == 0
    torch.testing.assert_close(taps[~dropped], (clean / (1 - rate)).expand(shape)[~dropped])  # not renormalised
    torch.testing.assert_close(taps.mean((0, 1)), clean.expand(shape).mean((0, 1)), atol=0.02, rtol=0)
    assert abs(dropped.float().mean() - rate) < 0.01
    for axis in range(4):  # neighbours in batch, time, head and tap are dropped independently
        kept_both = ~dropped.narrow(axis, 0, shape[axis] - 1) & ~dropped.narrow(axis, 1, shape[axis] - 1)
        assert abs(kept_both.float().mean() - (1 - rate) ** 2) < 0.02, f"axis {axis}"


def test_tap_dropout_reaches_the_output():
    mixer = make("lightconv", dim=4, heads=2, kernel_size=1, projected=False, glu=False, tap_dropout=0.5).train()
    y = mixer(torch.ones(4, 200, 4)).y  # the only tap is 1: outputs show the masks
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(y[..., 0], y[..., 1])
    assert not torch.equal(y[..., 1], y[..., 2])
    assert torch.equal(mixer.eval()(torch.ones(1, 3, 4)).y, torch.ones(1, 3, 4))


def test_initial_values():
    mixer = make("lightconv", dim=64, heads=8, kernel_size=31)
    bound = (6 / (31 + 8 * 31)) ** 0.5  # fans of a filter bank (8, 1, 31)
    assert 0.9 * bound < mixer.filters.abs().max() <= bound
    assert mixer.in_proj.bias.abs().max() == 0
    assert mixer.out_proj.bias.abs().max() == 0


@pytest.mark.parametrize("name", ["lightconv", "dynamicconv"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 0}, "kernel_size"),
        ({"conv_dim": 10}, "4 heads do not divide 10 channels"),
        ({"projected": False}, "glu=False"),
        ({"projected": False, "glu": False, "conv_dim": 8}, "conv_dim"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, dim=16, heads=4, **options)


def test_renormalise_needs_a_softmax():
    with pytest.raises(ValueError, match="tap_softmax=True"):
        make("dynamicconv", dim=16, heads=4, renormalise=True, tap_softmax=False)


# ---------------------------------------------------------------------- fairseq names


def fairseq_block(kind: str, glu: bool, dim: int, width: int, heads: int, kernel: int) -> dict[str, Tensor]:
    state = {
        "linear1.weight": torch.randn(2 * width if glu else width, dim),
        "linear1.bias": torch.randn(2 * width if glu else width),
        "linear2.weight": torch.randn(dim, width),
        "linear2.bias": torch.randn(dim),
    }
    if kind == "lightweight":
        return state | {"conv.weight": torch.randn(heads, 1, kernel)}
    return state | {
        "conv.weight_linear.weight": torch.randn(heads * kernel, width),
        "conv.conv_bias": torch.full((1, 1, width), float("nan")),  # newer fairseq stores it uninitialised
    }


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
@pytest.mark.parametrize(("glu", "softmax", "causal"), [(True, True, True), (False, True, False), (True, False, False)])
def test_conv_block_from_fairseq(kind, glu, softmax, causal):
    config = {
        "conv_type": kind,
        "kernel_size": 5,
        "heads": 2,
        "glu": glu,
        "weight_softmax": softmax,
        "conv_dim": 4,
        "causal": causal,
    }
    state = fairseq_block(kind, glu, dim=6, width=4, heads=2, kernel=5)
    imported = fairseq.convert_conv_block(config, state)
    ours = imported.module.state_dict()
    assert set(state) - set(imported.weight_map) <= {"conv.conv_bias"}
    for name, slot in imported.weight_map.items():
        assert torch.equal(slot.of(ours[slot.name]).reshape(state[name].shape), state[name]), name

    x = torch.randn(2, 7, 6)
    u = F.linear(x, state["linear1.weight"], state["linear1.bias"])
    u = F.glu(u) if glu else u
    if kind == "lightweight":
        taps = state["conv.weight"].view(2, 5).expand(2, 7, 2, 5)
    else:
        taps = F.linear(u, state["conv.weight_linear.weight"]).view(2, 7, 2, 5)
    conv = naive(u, taps.softmax(-1) if softmax else taps, before_of(5, causal))
    torch.testing.assert_close(
        imported.module(x).y, F.linear(conv, state["linear2.weight"], state["linear2.bias"]), atol=1e-4, rtol=1e-5
    )


def test_conv_block_uses_biases_that_the_config_names():
    config = {"conv_type": "dynamic", "kernel_size": 3, "heads": 2, "causal": True, "bias": True, "conv_bias": True}
    state = fairseq_block("dynamic", True, dim=4, width=4, heads=2, kernel=3)
    state |= {"conv.conv_bias": torch.arange(4.0).view(1, 1, 4), "conv.weight_linear.bias": torch.randn(6)}
    mixer = fairseq.convert_conv_block(config, state).module
    assert torch.equal(mixer.state_dict()["conv_bias"], torch.arange(4.0))
    assert torch.equal(mixer.state_dict()["tap_map.bias"], state["conv.weight_linear.bias"])


def test_fairseq_mistakes_are_named():
    config = {"conv_type": "dynamic", "kernel_size": 3, "heads": 2, "causal": True}
    with pytest.raises(ValueError, match=r"conv\.weight_linear\.weight"):
        fairseq.convert_conv_block(config, fairseq_block("lightweight", True, 4, 4, 2, 3))
    with pytest.raises(ValueError, match="lightweight, dynamic"):
        fairseq.convert_conv_block(config | {"conv_type": "light"}, fairseq_block("lightweight", True, 4, 4, 2, 3))
    case = {"kernel_size": 3, "num_heads": 2, "input_size": 4, "kind": "causal", "padding_l": 1}
    with pytest.raises(ValueError, match="padding_l 2, got 1"):
        fairseq.convert_conv(case, {"weight": torch.randn(2, 1, 3)})
