"""Tensors that say they are on cuda:0, and the rules of that device.

Operations on them come to `run`: through `__torch_dispatch__` of the tensors, or, for operations that make tensors on
the device and those that torch starts below Python, through a fallback for the whole CUDA backend. Both hold in every
thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tests.emulated_gpu import gpu_only, memory
from tests.emulated_gpu.counts import LAUNCH, SYNCHRONISATION, TO_DEVICE, TO_HOST, record

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default,
    aten.bincount.default,
}  # fmt: skip
"""Operations whose result or its size the CPU has to know."""

INDEXING = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}  # fmt: skip
"""Operations that move indices from the CPU by themselves."""

WITHOUT_LAUNCH = {
    aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.empty.memory_format, aten.empty_like.default,
    aten.new_empty.default, aten.empty_strided.default, aten.new_empty_strided.default, aten._unsafe_view.default,
    aten._local_scalar_dense.default, aten._fused_sdp_choice.default, aten.set_.source_Storage_storage_offset,
}  # fmt: skip

RESIZING = [
    "arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm", "randperm.generator",
]  # fmt: skip
"""Operations that torch composes of an empty tensor and one that resizes it, which ours cannot be."""


class DeviceTensor(Tensor):
    """A tensor on cuda:0. `host` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        self = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device=DEVICE,
        )  # fmt: skip
        self.host = host
        memory.add(host)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first.")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Says which tensors share memory, as those ask who write files."""
        return self.host.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        with torch.no_grad():
            copied = DeviceTensor(self.host.clone())
        copied.requires_grad_(self.requires_grad)
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != "host"})
        memo[id(self)] = copied
        return copied


def start() -> None:
    """Makes the device known to torch, for the rest of the process."""
    _libraries.append(torch.library.Library("_", "IMPL"))
    _libraries[-1].fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "CUDA")
    _libraries.append(torch.library.Library("aten", "IMPL"))
    _libraries[-1].impl("copy_", lambda to, *rest, **kwargs: run(aten.copy_.default, (to, *rest), kwargs), "CUDA")
    for name in RESIZING:
        operation, _, overload = name.partition(".")
        func = getattr(getattr(aten, operation), overload or "default")
        _libraries[-1].impl(name, lambda *args, _func=func, **kwargs: run(_func, args, kwargs), "CUDA")
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters that are moved become tensors of ours


_libraries: list[torch.library.Library] = []
"""They are in force as long as they exist."""


# ---------------------------------------------------------------------- operations


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the numbers of its tensors, after the checks of the device."""
    if func is aten.item.default or (func._overloadpacket is aten.to and _changes_device(args, kwargs)):
        return func.decompose(*args, **kwargs)  # in inference mode torch has not yet made a copy of it
    if func in (aten._to_copy.default, aten.copy_.default, aten.copy.default):
        return _copy(func, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    here = [one for one in leaves if isinstance(one, DeviceTensor)]
    there = [one for one in leaves if isinstance(one, Tensor) and not isinstance(one, DeviceTensor)]
    if here and func in INDEXING:
        _count_indices(args, there)
    elif here:
        _check_devices(func, here, there)
    if func.namespace == "subquad":
        return OPDEFS[func.name()]._init_fn(*args, **kwargs)  # what it launches comes back to us
    target = kwargs.get("device")
    if target is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"} | {"device": CPU}
    if target is None or torch.device(target).type == "cuda":
        _count(func, args, kwargs)
    if func is aten._fused_sdp_choice.default:
        return torch.nn.attention.SDPBackend.MATH.value
    given, options = tree_map(_numbers, (args, kwargs))
    with _device_generator(func):
        result = gpu_only.OPERATIONS.get(func, func)(*given, **options)
    if target is not None and torch.device(target).type == "cpu":
        return result
    assert all(one.shape == one.host.shape for one in here), f"{func} resized a tensor, which is not emulated"
    given_back = {id(one.host): one for one in here}
    with torch.inference_mode(False):  # views keep count of versions, which an inference tensor has none of
        result = tree_map(lambda one: given_back[id(one)] if id(one) in given_back else _on_device(one), result)
        return return_and_correct_aliasing(func, args, kwargs, result) if here else result


def _changes_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
    return any(one.type != args[0].device.type for one in devices)


def _numbers(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def _on_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


def _check_devices(func: Any, here: list[DeviceTensor], there: list[Tensor]) -> None:
    """RuntimeError if an operation gets tensors of both devices. Numbers of no dimension may be on the CPU."""
    wrong = [one for one in there if one.dim() or func.namespace == "subquad"]
    if wrong:
        shapes = [tuple(one.shape) for one in here], [tuple(one.shape) for one in wrong]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({func}: shapes {shapes[0]} on cuda:0 and {shapes[1]} on the CPU)"
        )


def _count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    waits_for_mask = func in INDEXING and _has_mask(args) and not _fills_mask(args)
    waits_for_repeats = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if func in WAITING or waits_for_mask or waits_for_repeats:
        record(SYNCHRONISATION, str(func))
    if func not in WITHOUT_LAUNCH and not _is_view(func):
        record(LAUNCH, str(func))


def _count_indices(args: tuple[Any, ...], there: list[Tensor]) -> None:
    """Indices and numbers on the CPU are moved, and waited for, unless numbers are written where a mask is True."""
    if not _fills_mask(args):
        for index in there:
            _count_copy(TO_DEVICE, "index", index, waits=True)


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether an index is one of booleans, which has to be turned into one of numbers."""
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _fills_mask(args: tuple[Any, ...]) -> bool:
    """Whether a single number is written where a mask is True, which needs no index of numbers."""
    accumulates = len(args) > 3 and args[3]
    return len(args) > 2 and args[2].numel() == 1 and _has_mask(args) and not accumulates


def _is_view(func: Any) -> bool:
    aliases = [one.alias_info for one in func._schema.arguments if one.alias_info is not None]
    return bool(aliases) and not any(one.is_write for one in aliases)


# ---------------------------------------------------------------------- copies


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default:
        (source,), target = args, kwargs.get("device")
        to_cuda = isinstance(source, DeviceTensor) if target is None else torch.device(target).type == "cuda"
        options = {
            name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "non_blocking")
        }
        result = func(_numbers(source), **options)
        _count_transfer(source, to_cuda, result, kwargs.get("non_blocking", False))
        return DeviceTensor(result) if to_cuda else result
    into, source = args[:2]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    on_device = isinstance(into, DeviceTensor)
    _count_transfer(source, on_device, into, non_blocking)
    result = func(_numbers(into), _numbers(source))
    return into if func is aten.copy_.default else DeviceTensor(result) if on_device else result


def _count_transfer(source: Tensor, to_cuda: bool, result: Tensor, non_blocking: bool) -> None:
    """A copy to the device waits unless it is told not to; one from the device also when its target is not pinned.

    torch pins what `x.to("cpu", non_blocking=True)` returns.
    """
    if isinstance(source, DeviceTensor) and to_cuda:
        record(LAUNCH, "aten.copy_.default")
    elif to_cuda:
        _count_copy(TO_DEVICE, "copy", source, waits=not non_blocking)
    else:
        _count_copy(TO_HOST, "copy", result, waits=not non_blocking)


def _count_copy(kind: str, name: str, value: Tensor, waits: bool) -> None:
    record(kind, name, value.numel() * value.element_size())
    if waits:
        record(SYNCHRONISATION, kind)


# ---------------------------------------------------------------------- random numbers


class _Random:
    """The device's generator: a state of the CPU's, which takes its place while the device draws."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.state = torch.Generator().manual_seed(0).get_state()

    def seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()


random = _Random()


@contextmanager
def _device_generator(func: Any) -> Iterator[None]:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    with random.lock:
        before = torch.get_rng_state()
        torch.set_rng_state(random.state)
        try:
            yield
        finally:
            random.state = torch.get_rng_state()
            torch.set_rng_state(before)
