"""Whole models are one graph for torch.compile, with every mechanism: a graph break costs a GPU its queue of work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad.mixers import available, mixer_class
from subquad.models import build_from_config

BATCH, LENGTH, WORDS = 2, 24, 50
STACK = {"layers": 2, "heads": 4, "ffn_dim": 32, "dropout": 0.1}
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [17]])
FEW = ("eva", "performer")
"""Mechanisms of the suite; all others are compiled at night."""


def forms() -> list[Any]:
    found = []
    for name in available():
        has = mixer_class(name).capabilities
        for causal in (False, True):
            if has.causal if causal else has.bidirectional:
                marks = () if name in FEW else pytest.mark.nightly
                found.append(pytest.param(name, causal, id=f"{name}-{'causal' if causal else 'both'}", marks=marks))
    return found


def count_graph_breaks(run: Callable[[], Tensor]) -> dict[str, int]:
    """How often torch.compile had to leave a graph while `run` was compiled and called, by its reasons."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    try:
        torch.compile(run, backend=keep)().sum().backward()
        counters = torch._dynamo.utils.counters
        breaks = counters["graph_break"] | counters["unimplemented"]  # branches are among the latter only
        assert breaks or (len(graphs) == 1 and not counters["resumes"]), f"{len(graphs)} graphs without a break"
        return dict(breaks)
    finally:
        torch._dynamo.reset()


def with_mixer(name: str) -> dict[str, Any]:
    longest = {"max_length": LENGTH} if "max_length" in mixer_class(name).Config.model_fields else {}
    return {**STACK, "mixer": {"name": name, **longest}}


@pytest.mark.parametrize(("name", "causal"), forms())
def test_a_model_has_no_graph_breaks(name: str, causal: bool) -> None:
    kind, side = ("language-model", "decoder") if causal else ("masked-language-model", "encoder")
    model = build_from_config({"kind": kind, "vocab": WORDS, "dim": 32, side: with_mixer(name)}).train()
    tokens = torch.randint(2, WORDS, (BATCH, LENGTH))
    assert count_graph_breaks(lambda: model(tokens, padding=PADDING).logits) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in available() if mixer_class(name).capabilities.cross])
def test_an_encoder_decoder_has_no_graph_breaks(name: str) -> None:
    sides = {"encoder": STACK, "decoder": {**STACK, "cross": with_mixer(name)["mixer"]}}
    config = {"kind": "encoder-decoder", "source_vocab": WORDS, "target_vocab": WORDS, "dim": 32, **sides}
    model = build_from_config(config).train()
    tokens = torch.randint(2, WORDS, (BATCH, LENGTH))
    assert count_graph_breaks(lambda: model(tokens, tokens, source_padding=PADDING).logits) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in available() if mixer_class(name).capabilities.grid])
def test_a_model_of_images_has_no_graph_breaks(name: str) -> None:
    config = {"kind": "vision", "image_size": 32, "patch_size": 4, "num_classes": 3, "dim": 32}
    stack = with_mixer(name)
    if "window" in mixer_class(name).Config.model_fields:
        stack["mixer"]["window"] = 4
    model = build_from_config({**config, "class_token": False, "encoder": stack}).train()
    images = torch.randn(BATCH, 3, 32, 32)
    assert count_graph_breaks(lambda: model(images).logits) == {}


def test_a_graph_break_is_seen() -> None:
    layer = nn.Linear(4, 4)

    def reads_a_number() -> Tensor:
        y = layer(torch.ones(4))
        return layer(y * y.sum().item())

    def branches_on_numbers() -> Tensor:
        y = layer(torch.ones(4))
        return y if y.sum() > 0 else -y

    for function in (reads_a_number, branches_on_numbers):
        assert sum(count_graph_breaks(function).values()) == 1
