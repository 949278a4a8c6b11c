"""Padding of whole stacks: what layers need to know of it is computed once, and tokens are moved once."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.mixers.layout import Padding
from subquad.models import build_from_config
from subquad.nn.block import BlockInputs
from subquad.nn.stack import Stack, StackConfig
from subquad.testing import close, enlarge, tokens
from tests.models.cases import OPTIONS, able

DIM = 16
LENGTHS = torch.tensor([9, 4, 0, 11])
RIGHT = torch.arange(11) >= LENGTHS[:, None]
LEFT = RIGHT.flip(1)
ANYWHERE = torch.stack([row[torch.randperm(11, generator=torch.Generator().manual_seed(3))] for row in RIGHT])


def stack_of(mechanism: str, layers: int = 2, **options: Any) -> Stack:
    torch.manual_seed(0)
    choice = {"name": mechanism, **OPTIONS.get(mechanism, {})}
    config = StackConfig(layers=layers, dim=DIM, heads=2, ffn_dim=24, mixer=choice, **options)
    stack = Stack(config)
    enlarge(stack)
    return stack.eval()


class Operations(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


# ---------------------------------------------------------------------- the object


@pytest.mark.parametrize("padding", [RIGHT, LEFT, ANYWHERE], ids=["right", "left", "anywhere"])
def test_tokens_go_to_the_front_and_back(padding: Tensor) -> None:
    x, rows = tokens(4, 11, 0), Padding.of(padding)
    front = rows.to_front(x)
    assert torch.equal(front[~RIGHT], x[~padding])
    assert torch.equal(rows.from_front(front), x)
    assert torch.equal(rows.of_front().padding, RIGHT)
    assert torch.equal(rows.pack(x), front.masked_fill(RIGHT[..., None], 0))
    assert torch.equal(rows.unpack(rows.pack(x)), x.masked_fill(padding[..., None], 0))
    assert rows.lengths.tolist() == LENGTHS.tolist()
    assert rows.layout.lengths is not None
    assert rows.layout.lengths.tolist() == [9, 4, 1, 11]  # a row without tokens counts as one zero
    assert (rows.place is None) == bool((padding == RIGHT).all())
    assert Padding.of(rows) is rows


def test_right_padding_is_known_without_looking() -> None:
    """From lengths alone, on any device: on the meta device no value can be read."""
    ours, other = Padding.right(LENGTHS, 11), Padding.of(RIGHT)
    assert ours.place is None
    assert torch.equal(ours.padding, RIGHT)
    assert torch.equal(ours.lengths, LENGTHS)
    torch.testing.assert_close(ours.layout[:3], other.layout[:3])
    elsewhere = Padding.right(LENGTHS.to("meta"), 11)
    x = torch.empty(4, 11, DIM, device="meta")
    assert elsewhere.to_front(x) is x
    assert elsewhere.of_front() is elsewhere
    assert Padding.of(RIGHT.to("meta")).place is not None


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_models_take_it(positions: str) -> None:
    embedding, stack = {"positions": positions}, {"layers": 1, "heads": 2, "ffn_dim": 8}
    ids = torch.randint(2, 13, (4, 11), generator=torch.Generator().manual_seed(0))
    right = Padding.right(LENGTHS, 11)
    text = {"vocab": 13, "dim": DIM, "embedding": embedding, "encoder": stack}
    pairs = {"source": embedding, "target": embedding, "encoder": stack, "decoder": stack, "dim": DIM}
    for options in (
        {"kind": "text-classifier", "num_classes": 3, **text},
        {"kind": "masked-language-model", **text},
        {"kind": "language-model", "vocab": 13, "dim": DIM, "embedding": embedding, "decoder": stack},
    ):
        model = build_from_config(options).eval()
        assert torch.equal(model(ids, padding=right).logits, model(ids, padding=RIGHT).logits)
    model = build_from_config({"kind": "encoder-decoder", "source_vocab": 13, "target_vocab": 13, **pairs}).eval()
    ours, other = (model(ids, ids, source_padding=padding, target_padding=padding).logits for padding in (right, RIGHT))
    assert torch.equal(ours, other)


# ---------------------------------------------------------------------- stacks


@pytest.mark.parametrize("padding", [LEFT, ANYWHERE], ids=["left", "anywhere"])
@pytest.mark.parametrize("mechanism", able("encoder"))
def test_where_tokens_stand_changes_nothing(mechanism: str, padding: Tensor) -> None:
    stack, x = stack_of(mechanism), tokens(4, 11, 0)
    front = Padding.of(padding).to_front(x)
    with torch.no_grad():
        torch.manual_seed(1)  # ra draws a key for each query, also in eval mode
        ours = stack(x, BlockInputs(padding)).x
        torch.manual_seed(1)
        other = stack(front, BlockInputs(RIGHT)).x
    assert close(ours[~padding], other[~RIGHT])
    assert ours.isfinite().all()


@pytest.mark.parametrize("padding", [RIGHT, ANYWHERE], ids=["right", "anywhere"])
@pytest.mark.parametrize("cross", [None, "softmax"], ids=["encoder", "decoder"])
def test_padding_costs_the_same_for_any_number_of_layers(padding: Tensor, cross: str | None) -> None:
    """Counting tokens and moving them are operations of the stack, not of its layers."""
    counts = []
    inputs = BlockInputs(padding, tokens(4, 11, 1), padding) if cross else BlockInputs(padding)
    for layers in (1, 4):
        stack = stack_of("lightconv", layers, cross=cross, causal=cross is not None)
        with torch.no_grad(), Operations() as operations:
            stack(tokens(4, 11, 0), inputs)
        counts.append({name: operations.count[name] for name in ("cumsum", "scatter", "gather", "sum")})
    assert counts[0] == counts[1]
    assert (counts[0]["scatter"] > 0) == (padding is ANYWHERE)


@pytest.mark.parametrize("mechanism", ["eva", "softmax", "lightconv"])
def test_blocks_compiled_one_by_one_take_any_padding(mechanism: str) -> None:
    stack, x = stack_of(mechanism), tokens(4, 11, 0)
    with torch.no_grad():
        eager = [stack(x, BlockInputs(padding)).x for padding in (RIGHT, LEFT, ANYWHERE)]
        torch._dynamo.reset()
        for block in stack.blocks:
            block.compile(backend="eager", fullgraph=True)
        for padding, expected in zip((RIGHT, LEFT, ANYWHERE), eager, strict=True):
            assert close(stack(x, BlockInputs(padding)).x, expected)
    torch._dynamo.reset()


def test_layers_computed_twice_have_the_same_gradients() -> None:
    stack, x = stack_of("eva").train(), tokens(4, 11, 0)
    gradients = []
    for recompute in (False, True):
        stack.recompute = recompute
        stack.zero_grad()
        torch.manual_seed(1)
        stack(x, BlockInputs(LEFT)).x.masked_fill(LEFT[..., None], 0).square().sum().backward()
        gradients.append([parameter.grad for parameter in stack.parameters() if parameter.grad is not None])
    assert len(gradients[0]) > 10
    for once, twice in zip(*gradients, strict=True):
        torch.testing.assert_close(once, twice)
