"""What torch.compile would launch: Inductor lowers the graphs of a mixer for a GPU, and its schedule is counted.

A group that Inductor fuses is one launch, which moves the bytes of its inputs and outputs; products and operations of
subquad stay launches of their own. Graphs are lowered and scheduled, and no code is generated: that would need a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda, move_to_fake_cuda
from subquad.mixers import Mixer


@dataclass(frozen=True)
class Compiled:
    """Launches and bytes of a forward and a backward pass; graphs: 1 if torch.compile never had to leave its graph."""

    graphs: int
    launches: int
    bytes: int


class _Properties:
    """What Inductor asks of a device: an A100's."""

    name, major, minor, type, warp_size = "A100", 8, 0, "cuda", 32
    gcnArchName = ""  # noqa: N815 - torch's own name
    multi_processor_count, total_memory, L2_cache_size = 108, 80 << 30, 40 << 20
    regs_per_multiprocessor, max_threads_per_multi_processor, max_threads_per_block = 65536, 2048, 1024
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 166912, 167936


class _NoDevice(contextlib.nullcontext[None]):
    """Choosing a device changes nothing."""


def count_compiled(mixer: Mixer, batch: int, length: int) -> Compiled:
    """A mixer's training pass under bfloat16 autocast, compiled. Its parameters are replaced by fake ones."""
    found: list[tuple[int, int]] = []
    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    with fake_cuda(), _inductors_device():
        move_to_fake_cuda(mixer.train())
        x = torch.empty(batch, length, mixer.config.dim, device=DEVICE, requires_grad=True)
        compiled = torch.compile(mixer, backend=_backend(graphs, found), dynamic=False)
        with torch.autocast("cuda", torch.bfloat16):
            out = compiled(x)
        outputs = [one for one in (out.y, out.aux) if one is not None]
        torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])
    torch._dynamo.reset()
    return Compiled(len(graphs), sum(launches for launches, _ in found), sum(moved for _, moved in found))


@contextlib.contextmanager
def _inductors_device() -> Iterator[None]:
    """Answers of a device that is not there, for what Inductor asks while it lowers a graph."""
    import torch.utils._triton as triton_checks
    from torch._inductor import config

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    own = {
        "device_count": 1,
        "current_device": 0,
        "_get_device_properties": _Properties(),
        "get_device_capability": (8, 0),
        "get_device_name": "A100",
        "is_initialized": True,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "current_stream": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    internal: dict[str, Any] = {"_cuda_getDevice": 0, "_cuda_getDeviceCount": 1, "_cuda_getCurrentRawStream": 0}
    internal |= {"_cuda_setDevice": None, "_cuda_exchangeDevice": 0, "_cuda_maybeExchangeDevice": 0}
    internal |= {"_cuda_isCurrentStreamCapturing": False}
    with contextlib.ExitStack() as stack:
        for name, value in own.items():
            stack.enter_context(patch.object(torch.cuda, name, answer(value), create=True))
        for name, value in internal.items():
            stack.enter_context(patch.object(torch._C, name, answer(value), create=True))
        stack.enter_context(patch.object(torch.cuda, "device", _NoDevice))
        stack.enter_context(patch.object(torch.cuda, "default_generators", (torch.default_generator,)))
        for name in ("has_triton", "has_triton_package"):
            stack.enter_context(patch.object(triton_checks, name, answer(True)))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        yield


def _backend(graphs: list[fx.GraphModule], found: list[tuple[int, int]]) -> Callable[..., Any]:
    """A backend of torch.compile that schedules graphs as Inductor does, and runs them as they are."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def compiler(is_backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: fx.GraphModule, _: Sequence[Tensor]) -> Any:
            with unset_fake_temporarily():
                found.append(_schedule(graph, is_backward))
            return make_boxed_func(graph.forward)

        return compile_graph

    def partition(graph: fx.GraphModule, inputs: Sequence[Tensor], **options: Any) -> Any:
        with V.set_fake_mode(_fake_mode(graph)):
            replace_random_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

    def backend(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        graphs.append(graph)
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=compiler(False),
            bw_compiler=compiler(True),
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )

    return backend


def _schedule(graph: fx.GraphModule, is_backward: bool) -> tuple[int, int]:
    """Launches and bytes of a graph."""
    from torch._inductor import debug
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    mode = _fake_mode(graph)
    with V.set_fake_mode(mode), V.set_debug_handler(debug.DebugContext()):
        _recursive_post_grad_passes(graph, is_inference=False)
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        lowering = GraphLowering(
            graph, example_inputs=inputs, shape_env=mode.shape_env, is_backward=is_backward, is_inference=False
        )
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            nodes = [node for node in lowering.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
            return len(nodes), sum(int(node.get_read_write_buffers_sizes()) for node in nodes)


def _fake_mode(graph: fx.GraphModule) -> Any:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
