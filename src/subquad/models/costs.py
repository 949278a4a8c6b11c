"""What a model costs, without running it: the work is traced on the meta device, where tensors have shapes only.

    flops             of products, convolutions and attention in one forward pass, as torch counts them: 2 for each
                      multiply-add; training does about three times as much
    training_bytes    weights, their gradients, Adam's two averages, and what the backward pass keeps
    decoding_bytes    weights, and the streaming state after `length` tokens

Numbers are for float32 and the plain form of every mechanism; fused kernels keep less.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from subquad.models.base import Model, build_from_config
from subquad.models.language import LanguageModel
from subquad.models.presets import merge_options
from subquad.models.seq2seq import Seq2Seq

FLOAT_BYTES = 4
TRAINING_COPIES = 4
"""Weights, gradients and two averages."""


@dataclass(frozen=True)
class Costs:
    """tokens: what one forward pass reads, of both sides where there are two. None: the model cannot stream."""

    tokens: int
    parameters: int
    flops: int
    activation_bytes: int
    training_bytes: int
    state_bytes: int | None
    decoding_bytes: int | None

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.tokens


@register_flop_formula([torch.ops.subquad.tap_conv, torch.ops.subquad.softmax_tap_conv])
def _tap_conv_flops(x: Any, taps: Any, *_: Any, **__: Any) -> int:
    """Every input channel meets each of the K taps once."""
    return 2 * torch.Size(x).numel() * taps[-1]


def estimate_costs(config: dict[str, Any], batch: int, length: int, streaming: bool = True) -> Costs:
    """Of a model with this resolved config, for a batch of sequences of `length` tokens (images have their own).

    streaming: whether the state of decoding is of interest; tracing it takes a while for mechanisms with small steps.
    """
    whole: dict[str, Any] = {side: {"layer_drop": 0.0} for side in ("encoder", "decoder") if side in config}
    with torch.device("meta"):
        model = build_from_config(merge_options(config, whole))
        given = model.random_inputs(batch, model.native_length or length)
        model.eval()
        flops = forward_flops(lambda: model(*given))
        kept = _kept_for_backward(model.train(), given)
        state = _state_bytes(model.eval(), batch, length) if streaming else None
    weights = FLOAT_BYTES * model.parameter_count()
    tokens = batch * model.native_length if model.native_length else sum(part.numel() for part in given)
    return Costs(
        tokens=tokens,
        parameters=model.parameter_count(),
        flops=flops,
        activation_bytes=kept,
        training_bytes=TRAINING_COPIES * weights + kept,
        state_bytes=state,
        decoding_bytes=None if state is None else weights + state,
    )


def forward_flops(run: Callable[[], object]) -> int:
    """FLOPs of what `run` computes. Fused kernels are not counted: its tensors should be on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def _kept_for_backward(model: Model, given: tuple[Tensor, ...]) -> int:
    """Bytes that a training step keeps between forward and backward, each tensor counted once."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held until the end, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*given)
    del output
    return sum(storage.nbytes() for storage in kept.values())


def _state_bytes(model: Model, batch: int, length: int) -> int | None:
    """Bytes of the streaming state after `length` tokens; None if the model cannot stream."""
    if not isinstance(model, LanguageModel | Seq2Seq):
        return None
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    with torch.no_grad():
        try:
            state = model.init_state(batch)
        except ValueError:  # a mechanism in the decoder has no streaming form with its options
            return None
        if isinstance(model, Seq2Seq):
            after = model.decode(tokens, model.encode(tokens).x, state=state).state
        else:
            after = model(tokens, state=state).state
    assert after is not None
    return sum(tensor.numel() * tensor.element_size() for tensor in after.tensors())
