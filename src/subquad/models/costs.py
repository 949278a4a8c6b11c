"""Estimates the cost of a model without running it. It is traced on the meta device, where tensors have no data.

    flops             of matrix products, convolutions and attention in one forward pass, as torch counts them: 2 for
                      each multiply-add; training needs about three times as many
    training_bytes    weights, gradients, the two averages of Adam, and the activations that the backward pass needs
    decoding_bytes    weights, and the streaming state after `length` tokens

Numbers are for float32 and the reference implementation of every mechanism; fused kernels need less memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from subquad.config import merge_options
from subquad.models.base import Model, build_from_config
from subquad.models.language import LanguageModel
from subquad.models.seq2seq import Seq2Seq

FLOAT_BYTES = 4
TRAINING_COPIES = 4
"""Copies of the weights in training: weights, gradients and two averages."""


@dataclass(frozen=True)
class Costs:
    """tokens: those of one forward pass, source and target together. The last two are None without streaming."""

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
    """Each of the K taps is multiplied once with every input value."""
    return 2 * torch.Size(x).numel() * taps[-1]


def estimate_costs(config: dict[str, Any], batch: int, length: int, streaming: bool = True) -> Costs:
    """Estimates the costs of a complete config for a batch of sequences of `length` tokens (images ignore `length`).

    streaming: whether the state of decoding is measured, which takes long for some mechanisms.
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
    """Counts the FLOPs of `run`. Its tensors should be on the meta device: fused kernels are not counted."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def _kept_for_backward(model: Model, given: tuple[Tensor, ...]) -> int:
    """Counts the bytes that a training step keeps from forward to backward pass, each tensor once."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # kept until the end, so that no address is reused

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
    """Counts the bytes of the streaming state after `length` tokens; None if the model cannot stream."""
    if not isinstance(model, LanguageModel | Seq2Seq):
        return None
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    with torch.no_grad():
        try:
            state = model.init_state(batch)
        except ValueError:  # a mechanism in the decoder cannot stream with its options
            return None
        if isinstance(model, Seq2Seq):
            after = model.decode(tokens, model.encode(tokens).x, state=state).state
        else:
            after = model(tokens, state=state).state
    assert after is not None
    return sum(tensor.numel() * tensor.element_size() for tensor in after.tensors())
