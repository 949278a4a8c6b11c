"""Counts what a forward and a backward pass would launch on a GPU.

An operation of torch is one launch, which reads every input and writes every output once; a matrix product has the
FLOPs that torch's own counter gives it. Views launch nothing. An operation of subquad is entered: the torch operations
in it are counted like others, and its Triton kernels by `traffic/`. Softmax attention is modelled (`flash.py`).

Memory is what tensors hold while they live, which is as on a GPU: autograd keeps and frees fake ones the same way.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda, move_to_fake_cuda
from benchmarks.gpu.flash import modelled_attention
from benchmarks.gpu.hardware import FLOAT32, GPU, HOST, TENSOR
from benchmarks.gpu.traffic import traffic_of
from benchmarks.gpu.triton_launches import Launch, intercept
from subquad.mixers import Mixer

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


def pass_seconds(kernels: Sequence[Kernel], gpu: GPU) -> float:
    """The time of launches one after the other, or of the host that makes them, if that is slower."""
    return max(sum(kernel.seconds(gpu) for kernel in kernels), HOST * len(kernels))


class Counter(TorchDispatchMode):
    """Records launches in `kernels` while it is entered, and in `peak` the most bytes that its new tensors held.

    Numbers that a model reads are not there: `waits` counts how often it asks for one, and is told 1. Where it asks
    for places that are not zero, it gets the share of all places that `shares` says next, or all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.phase = "forward"
        self.waits = 0
        self.shares: Iterator[float] = iter(())
        self.live = self.peak = 0
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "subquad":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.nonzero.default):
            return self._answer(func, args[0])
        if func.namespace == "aten":
            with self:  # in the body of an operation also operations arrive that torch makes of others, such as `to`
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self._watch(out)
        if not (_is_view(func) or func in NO_LAUNCH or func.namespace in ("prim", "profiler")):
            self._count(func, args, kwargs, out)
        return out

    def _answer(self, func: Any, asked: Tensor) -> Any:
        self.waits += asked.device == DEVICE
        if func is aten._local_scalar_dense.default:
            return 1
        places = round(next(self.shares, 1.0) * asked.numel())
        found = torch.empty(places, asked.dim(), dtype=torch.int64, device=asked.device)
        self._watch(found)
        self._count(func, (asked,), {}, found)
        return found

    def _watch(self, out: Any) -> None:
        """Counts the memory of new tensors until they are freed."""
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if tensor.device == DEVICE and storage not in self._storages:
                self._storages.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, held: int) -> None:
        self.live -= held

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


def count_mixer(mixer: Mixer, batch: int, length: int) -> Counter:
    """The launches and the memory of a mixer's training pass on an input (batch, length, dim), with its gradient.

    A mixer in float32 runs under bfloat16 autocast. Its parameters are replaced by fake ones.
    """
    with fake_cuda():
        move_to_fake_cuda(mixer.train())
        dtype = next(mixer.parameters()).dtype
        x = torch.empty(batch, length, mixer.config.dim, dtype=dtype, device=DEVICE, requires_grad=True)
        with counting() as counter:
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
                out = mixer(x)
            outputs = [one for one in (out.y, out.aux) if one is not None]
            counter.phase = "backward"
            torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])
    return counter


def _is_view(func: Any) -> bool:
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return any(not alias.is_write for alias in aliases) and not func._schema.is_mutable


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes at different addresses: a dimension of stride 0 repeats the same ones."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()
