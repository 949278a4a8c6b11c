"""Counts what a forward and a backward pass would launch on a GPU.

An operation of torch is one launch, which reads every input and writes every output once; a matrix product has the
FLOPs that torch's own counter gives it. Views launch nothing. An operation of subquad is entered: the torch operations
in it are counted like others, and its Triton kernels by `traffic/`. Softmax attention is modelled (`flash.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda, move_to_fake_cuda
from benchmarks.gpu.flash import modelled_attention
from benchmarks.gpu.hardware import FLOAT32, GPU, TENSOR
from benchmarks.gpu.traffic import traffic_of
from benchmarks.gpu.triton_launches import Launch, intercept

aten = torch.ops.aten
NO_LAUNCH = {
    aten.detach.default,
    aten.alias.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten.lift_fresh.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
}
LOOKUPS = {aten.index_select.default, aten.gather.default, aten.embedding.default}
FILLS = {aten.zero_.default, aten.fill_.Scalar}
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernel:
    """One launch. phase: forward or backward; flops: (kind of `hardware.py`, number) pairs; shapes: of its inputs."""

    name: str
    phase: str
    bytes: int
    flops: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[int, ...], ...]

    def seconds(self, gpu: GPU) -> float:
        return gpu.seconds(self.bytes, dict(self.flops))


class Counter(TorchDispatchMode):
    """Records launches in `kernels` while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.phase = "forward"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "subquad":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        if not (_is_view(func, args, out) or func in NO_LAUNCH or func.namespace in ("prim", "profiler")):
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = _tensors((args, kwargs))
        outputs = _tensors(out)
        if not any(one.device == DEVICE for one in (*inputs, *outputs)):
            return
        written = sum(map(_bytes, outputs))
        read = sum(_bytes(one) for one in {id(one): one for one in inputs}.values())
        if func in LOOKUPS:  # of a table only what is looked up
            read = min(read, 2 * written)
        if func in FILLS:
            read = 0
        flops = 0
        if func._overloadpacket in flop_registry:
            operands = [one for one in args if not isinstance(one, torch.dtype)]  # torch counts without out_dtype
            flops = flop_registry[func._overloadpacket](*operands, **kwargs, out_val=out)
        # factors, to whose product a float32 sum may be added
        kind = TENSOR if any(one.dtype in HALVES for one in inputs) else FLOAT32
        name = str(func).removeprefix("aten.").removesuffix(".default")
        self.record(name, read + written, ((kind, flops),) if flops else (), inputs)

    def count_launch(self, launch: Launch, run: Callable[[], Any]) -> None:  # noqa: ARG002 - fake tensors run nothing
        found = traffic_of(launch)
        flops = dict(found.dots)
        if found.flops:
            flops[FLOAT32] = flops.get(FLOAT32, 0) + found.flops
        tensors = _tensors(vars(launch.arguments))
        self.record(launch.kernel, found.loaded + found.stored, tuple(flops.items()), tensors)

    def record(self, name: str, moved: int, flops: tuple[tuple[str, int], ...], inputs: Sequence[Tensor]) -> None:
        shapes = tuple(tuple(one.shape) for one in inputs[:3])
        self.kernels.append(Kernel(name, self.phase, moved, flops, shapes))


@contextmanager
def counting() -> Iterator[Counter]:
    """Counts the launches within it, which has to be within `fake_cuda`."""
    counter = Counter()
    with intercept(counter.count_launch), modelled_attention(counter.record), counter:
        yield counter


def count_mixer(mixer: nn.Module, batch: int, length: int) -> list[Kernel]:
    """The launches of a mixer's training pass under bfloat16 autocast, its input (batch, length, dim) differentiated.

    The mixer's own parameters are replaced by fake ones.
    """
    with fake_cuda():
        move_to_fake_cuda(mixer.train())
        x = torch.empty(batch, length, mixer.config.dim, device=DEVICE, requires_grad=True)  # type: ignore[union-attr]
        with counting() as counter:
            with torch.autocast("cuda", torch.bfloat16):
                out = mixer(x)
            outputs = [one for one in (out.y, out.aux) if one is not None]
            counter.phase = "backward"
            torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])
    return counter.kernels


def _is_view(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Whether a result is the same memory. `to`, which the body of an operation calls as a whole, may copy or not."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    if func._schema.is_mutable or all(alias.is_write for alias in aliases):
        return False
    given = {one.untyped_storage()._cdata for one in _tensors(args)}
    return all(one.untyped_storage()._cdata in given for one in _tensors(out))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes at different addresses: a dimension of stride 0 repeats the same ones."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()
