"""The interface of the efficient-attention library over our mixers, for code that was written for the library.

    from subquad.interop.checkpoints.efficient_attention import AttentionFactory, NestedNamespace

    AttentionFactory.add_attn_specific_args(parser, "eva", struct_name="attn_args", prefix="")
    args = parser.parse_args(namespace=NestedNamespace())
    attn = AttentionFactory.build_attention(
        attn_name="eva", attn_args={**vars(args.attn_args), "dim": 192, "num_heads": 3}
    )
    y = attn(x, key_padding_mask=mask)

State dicts have the names and shapes of the library, for loading and for saving. The modules compute what the library's
modules compute, except for padding: here padded positions contribute nothing and their outputs are zero.
"""

import argparse
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from math import isqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from subquad.config import nearest
from subquad.interop.checkpoints.efficient_attention.mixers import build_mixer
from subquad.mixers import Mixer
from subquad.mixers.windows import OffsetTable
from subquad.original_names import ATTENTION

INDEX = "relative_position_index"
"""A table in the library's state dicts that follows from the window, so it is not loaded."""

# ---------------------------------------------------------------------- arguments


class Argument(NamedTuple):
    """An option of a mechanism, which is a keyword and a flag with dashes. A `bool` is a flag without a value."""

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str


_PRECISION = (Argument("fp32", bool, False, "It is accepted and not used, as in the library."),)
_WINDOW = (
    Argument("use_rpe", bool, False, "Use learned relative biases in a window."),
    Argument("window_size", int, 4, "The tokens of a window, or the cells of its side."),
    Argument("attn_2d", bool, False, "Use windows on the grid of an image."),
    Argument("overlap_window", bool, False, "Let windows overlap with their neighbours."),
)
_FEATURES = (
    Argument("approx_attn_dim", int, 64, "The number of random features."),
    Argument("proj_method", str, "favorp", "The feature map."),
    Argument("cos_weighting", bool, False, "Weight features by the cosine of positions."),
    Argument("sample_scheme", str, "default", "The projection: default (drawn anew), fixed or learnable."),
)
_ADAPTIVE = Argument("adaptive_proj", str, "default", "The linear maps of the means of chunks.")
_T5 = Argument("use_t5_rpe", bool, False, "Use relative biases by distance, as in T5.")

ARGUMENTS: Mapping[str, tuple[Argument, ...]] = {
    "performer": _PRECISION + _FEATURES,
    "softmax": _PRECISION,
    "local": _PRECISION + _WINDOW,
    "lara": (
        *_PRECISION,
        Argument("num_landmarks", int, 49, "The number of landmarks."),
        Argument("kernel_size", int, None, "It is accepted and not used, as in the library."),
        Argument("pool_module_type", str, "light", "The linear maps of landmarks: light (one for all heads) or dense."),
        Argument("mis_type", str, "mis-opt", "The weights of the proposals: mis-opt, mis-bh or mis-biased."),
        Argument("proposal_gen", str, "pool", "How landmarks are made: pool, no-param-pool, adaptive-1d or ..-mixed."),
        Argument("use_antithetics", bool, False, "Draw pairs of opposite signs."),
        Argument("use_multisample", bool, False, "Draw twice for each landmark."),
        Argument("alpha_coeff", float, 1.0, "The strength of the correction of mis-opt."),
    ),
    "ra": (
        *_PRECISION,
        Argument("num_samples", int, 1, "1 draws one key, 0 uses the mean of keys, and -1 the softmax of keys."),
    ),
    "scatterbrain": _PRECISION + _WINDOW + _FEATURES,
    "eva": (
        *_PRECISION,
        *_WINDOW,
        _ADAPTIVE,
        Argument("num_landmarks", int, 49, "The approximate number of chunks."),
        _T5,
    ),
    "causal_eva": (
        _ADAPTIVE,
        Argument("num_chunks", int, None, "The number of chunks, unless chunk_size is given."),
        Argument("chunk_size", int, None, "The tokens of a chunk."),
        Argument("causal", bool, False, "Let a token see only itself and the tokens before it."),
        _T5,
        Argument("window_size", int, 4, "The tokens of a window."),
        Argument("overlap_window", bool, False, "Let a window see the window before it."),
    ),
}
"""The options of each mechanism, in the order of the library, with the defaults of its command line."""

_SHARED = ("dim", "num_heads", "qkv_bias", "attn_drop", "proj_drop")


def _arguments_of(attn_name: str) -> tuple[Argument, ...]:
    if attn_name not in ARGUMENTS:
        raise KeyError(f"no attention is called {attn_name!r}{nearest(attn_name, ARGUMENTS)} ({', '.join(ARGUMENTS)})")
    return ARGUMENTS[attn_name]


def _refuse_unknown(attn_name: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise TypeError(f"{attn_name} has no argument {key!r}{nearest(key, known)} ({', '.join(known)})")


def _in_words_of_the_library(message: str) -> str:
    """A message about an option of ours, such as "eva: window: ...", with the name that the library has for it."""
    owner, _, rest = message.partition(": ")
    name, colon, problem = rest.partition(": ")
    theirs = next((flag for flag, one in ATTENTION.items() if colon and one.fields == name), None)
    if theirs is None:
        return message
    return f"{owner}: {theirs.removeprefix('--').replace('-', '_')} ({theirs}): {problem}"


class NestedNamespace(argparse.Namespace):
    """A namespace in which "a.b" is attribute b of the namespace a, which is created when it is first needed."""

    def __setattr__(self, name: str, value: Any) -> None:
        group, dot, rest = name.partition(".")
        if not dot:
            super().__setattr__(name, value)
            return
        inner = getattr(self, group, None)
        if inner is None:
            inner = NestedNamespace()
            super().__setattr__(group, inner)
        if not isinstance(inner, argparse.Namespace):
            raise AttributeError(f"{name!r} cannot be set: {group!r} is {inner!r}, not a namespace")
        setattr(inner, rest, value)


def add_nested_argument(
    parser: argparse._ActionsContainer, flag: str, struct_name: str = "attn_args", prefix: str = "", **options: Any
) -> argparse.Action:
    """Adds --PREFIX-NAME. Its value goes to attribute NAME (with underscores) of the namespace `struct_name`."""
    name = flag.removeprefix("--").removeprefix(f"{prefix}-").replace("-", "_")
    return parser.add_argument(flag, dest=f"{struct_name}.{name}", **options)


def remove_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Removes an argument from the parser. name: a flag of the argument, or its destination."""
    found = [action for action in parser._actions if name in (action.dest, *action.option_strings)]
    if not found:
        raise ValueError(f"the parser has no argument {name!r}")
    for action in found:
        for flag in action.option_strings:
            del parser._option_string_actions[flag]
        for group in parser._action_groups:
            if action in group._group_actions:
                group._remove_action(action)


def add_attn_specific_args(
    parser: argparse.ArgumentParser, attn_name: str, struct_name: str = "attn_args", prefix: str = ""
) -> argparse.ArgumentParser:
    """Adds the options of a mechanism to the parser, and returns the parser.

    With prefix "encoder-attn" the flag of window_size is --encoder-attn-window-size. Its value goes to attribute
    window_size of the namespace `struct_name`, if the parser fills a `NestedNamespace`.
    """
    group = parser.add_argument_group(f"attention: {attn_name}")
    start = f"--{prefix}-" if prefix else "--"
    for argument in _arguments_of(attn_name):
        options: dict[str, Any] = {"default": argument.default, "help": argument.help}
        options |= {"action": "store_true"} if argument.type is bool else {"type": argument.type}
        add_nested_argument(group, start + argument.name.replace("_", "-"), struct_name, prefix, **options)
    return parser


# ---------------------------------------------------------------------- modules


class LibraryModule(nn.Module):
    """A mixer whose state dict is read and written with the names of the library's module."""

    mixer: Mixer

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        try:
            fresh = build_mixer(config)
        except ValueError as error:
            raise ValueError(_in_words_of_the_library(str(error))) from None
        self.mixer, self.weight_map = fresh.module, dict(fresh.weight_map)
        self.register_load_state_dict_pre_hook(_from_library)
        self.register_state_dict_post_hook(_to_library)


def _from_library(module: LibraryModule, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames the library's tensors before loading. Those that are rows of one tensor of ours come in its order."""
    state.pop(f"{prefix}{INDEX}", None)
    parts: dict[str, list[Tensor]] = {}
    for original, ref in module.weight_map.items():
        if f"{prefix}{original}" in state:
            parts.setdefault(ref.name, []).append(state.pop(f"{prefix}{original}"))
    for ours, tensors in parts.items():
        state[f"{prefix}mixer.{ours}"] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _to_library(module: LibraryModule, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Renames our tensors after they were collected."""
    start = f"{prefix}mixer."
    ours = {name.removeprefix(start): state.pop(name) for name in list(state) if name.startswith(start)}
    for original, ref in module.weight_map.items():
        state[f"{prefix}{original}"] = ref.of(ours[ref.name])
    table = getattr(module.mixer, "bias", None)
    if isinstance(table, OffsetTable):
        state[f"{prefix}{INDEX}"] = table.rows


class Attention(LibraryModule):
    """Self-attention of x (batch, time, C) or of an image (batch, H, W, C). The output has the shape of x.

    attn_args: dim, num_heads, qkv_bias (True), attn_drop (0), proj_drop (0), and the options of the mechanism.
    """

    def __init__(self, attn_name: str, **attn_args: Any) -> None:
        _refuse_unknown(attn_name, attn_args, (*_SHARED, *(argument.name for argument in _arguments_of(attn_name))))
        for needed in ("dim", "num_heads"):
            if needed not in attn_args:
                raise TypeError(f"{attn_name} needs the argument {needed!r}")
        super().__init__({"attn_name": attn_name, **attn_args})
        self.needs_grid = bool(attn_args.get("attn_2d"))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """key_padding_mask: (batch, time) or (batch, H, W), not 0 at positions to ignore."""
        padding = None if key_padding_mask is None else key_padding_mask.flatten(1) != 0
        return self.mixer(x.flatten(1, -2), padding=padding, grid=self._grid(x)).y.view_as(x)

    def _grid(self, x: Tensor) -> tuple[int, int] | None:
        if x.dim() == 4:
            return x.shape[1], x.shape[2]
        if not self.needs_grid:
            return None
        side = isqrt(x.shape[1])  # the library reads such a sequence as a square
        if side * side != x.shape[1]:
            raise ValueError(f"attn_2d needs (batch, H, W, C) or a square number of tokens, got {x.shape[1]}")
        return side, side


class TimeFirstAttention(LibraryModule):
    """Causal EVA with the interface of fairseq's attention: query (time, batch, C) -> the same shape, and None.

    attn_args: the mechanism's own options, as a namespace or a mapping.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        self_attention: bool = False,
        q_noise: float = 0.0,
        qn_block_size: int = 8,  # noqa: ARG002 - means something with q_noise only
        attn_args: argparse.Namespace | Mapping[str, Any] | None = None,
    ) -> None:
        if attn_args is None:
            raise TypeError("causal_eva needs the argument 'attn_args'")
        given = dict(attn_args) if isinstance(attn_args, Mapping) else vars(attn_args)
        own = ARGUMENTS["causal_eva"]
        _refuse_unknown("causal_eva", given, tuple(argument.name for argument in own))
        if {kdim or embed_dim, vdim or embed_dim} != {embed_dim} or q_noise or not bias:
            raise ValueError("causal_eva needs biases, no q_noise, and kdim and vdim equal to embed_dim")
        given = {argument.name: argument.default for argument in own} | given
        size = {"embed_dim": embed_dim, "num_heads": num_heads, "dropout": dropout}
        super().__init__({"attn_name": "causal_eva", **size, "attn_args": given})
        self.self_attention = self_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: Any = None,
        need_weights: bool = True,  # noqa: ARG002 - weights are never returned, as in the library
        static_kv: bool = False,  # noqa: ARG002 - nothing is kept between calls
        attn_mask: Tensor | None = None,  # noqa: ARG002 - causality is an option of the module, as in the library
        before_softmax: bool = False,  # noqa: ARG002
        need_head_weights: bool = False,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        """key_padding_mask: (batch, time), not 0 at positions to ignore."""
        if not self.self_attention and any(other is not None and other is not query for other in (key, value)):
            raise ValueError("causal_eva mixes one sequence: give the same tensor as query, key and value")
        if incremental_state is not None:
            raise ValueError("causal_eva cannot decode with fairseq's state; stream with `module.mixer.init_state`")
        padding = None if key_padding_mask is None else key_padding_mask != 0
        return self.mixer(query.transpose(0, 1), padding=padding).y.transpose(0, 1), None


def _check_time_first(given: Mapping[str, Any]) -> None:
    """Refuses arguments of the other mechanisms: causal_eva has those of fairseq's attention, its own apart."""
    known = list(inspect.signature(TimeFirstAttention).parameters)
    own = [argument.name for argument in ARGUMENTS["causal_eva"]]
    if wrong := next((name for name in given if name not in known), None):
        said = "is called embed_dim" if wrong == "dim" else "belongs into attn_args" if wrong in own else "is unknown"
        raise TypeError(
            f"causal_eva: {wrong!r} {said}. It is built like fairseq's attention, with the arguments "
            f"{', '.join(known)}; attn_args is a namespace or a mapping with the options of the mechanism: "
            f"{', '.join(own)}"
        )


class AttentionFactory:
    """The library's mechanisms by name."""

    attn_dict: ClassVar[dict[str, Callable[..., LibraryModule]]] = {
        name: TimeFirstAttention if name == "causal_eva" else partial(Attention, name) for name in ARGUMENTS
    }

    @classmethod
    def build_attention(cls, attn_name: str, attn_args: Mapping[str, Any]) -> LibraryModule:
        """Returns the module of a mechanism. Unknown mechanisms raise a KeyError, and unknown arguments a TypeError."""
        _arguments_of(attn_name)
        if attn_name == "causal_eva":
            _check_time_first(attn_args)
        return cls.attn_dict[attn_name](**attn_args)

    add_attn_specific_args = staticmethod(add_attn_specific_args)
