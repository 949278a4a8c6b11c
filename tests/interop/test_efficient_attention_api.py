"""Code written against the efficient-attention library, with another import line."""

import argparse
import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad.interop.checkpoints.efficient_attention import api as efficient_attention
from subquad.interop.checkpoints.efficient_attention.api import (
    ARGUMENTS,
    AttentionFactory,
    NestedNamespace,
    add_attn_specific_args,
    add_nested_argument,
    remove_argument,
)
from tests.originals.efficient_attention import follows_original, replay
from tests.originals.files import FOLDER, OUTPUT_TOLERANCE, Fixture, assert_close, load

# ---------------------------------------------------------------------- arguments


def parsed(words: list[str], attn_name: str, **options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attn-name", default="softmax")
    AttentionFactory.add_attn_specific_args(parser, attn_name, **options)
    return parser.parse_args(words, namespace=NestedNamespace())


def test_a_module_is_built_from_a_command_line() -> None:
    """As the library's README has it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--attn-name", default="softmax", type=str)
    words = ["--attn-name", "eva", "--window-size", "7", "--num-landmarks", "4", "--attn-2d", "--use-rpe"]
    chosen, _ = parser.parse_known_args(words)
    efficient_attention.AttentionFactory.add_attn_specific_args(
        parser, chosen.attn_name, struct_name="attn_args", prefix=""
    )
    args = parser.parse_args(words, namespace=efficient_attention.NestedNamespace())
    assert args.attn_args.window_size == 7
    attn_args = {
        **vars(args.attn_args),
        "dim": 32,
        "num_heads": 4,
        "qkv_bias": True,
        "attn_drop": 0.1,
        "proj_drop": 0.2,
    }
    attention = AttentionFactory.build_attention(attn_name=args.attn_name, attn_args=attn_args)
    x = torch.randn(2, 14, 14, 32)
    assert attention(x).shape == x.shape
    assert attention.mixer.config.relative == "table"
    assert attention.mixer.config.dropout == 0.2


def test_prefixes_keep_two_mechanisms_apart() -> None:
    parser = argparse.ArgumentParser()
    add_attn_specific_args(parser, "lara", "attn_args_encoder", "encoder-attn")
    add_attn_specific_args(parser, "causal_eva", struct_name="attn_args_decoder", prefix="decoder-attn")
    words = ["--encoder-attn-num-landmarks", "8", "--decoder-attn-causal", "--decoder-attn-chunk-size", "8"]
    args = parser.parse_args(words, namespace=NestedNamespace())
    assert args.attn_args_encoder.num_landmarks == 8
    assert args.attn_args_encoder.proposal_gen == "pool"
    assert args.attn_args_decoder == NestedNamespace(
        adaptive_proj="default",
        num_chunks=None,
        chunk_size=8,
        causal=True,
        use_t5_rpe=False,
        window_size=4,
        overlap_window=False,
    )


def test_two_mechanisms_without_prefixes_conflict() -> None:
    parser = argparse.ArgumentParser()
    add_attn_specific_args(parser, "eva")
    with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
        add_attn_specific_args(parser, "performer")


def test_nested_names_make_namespaces() -> None:
    space = NestedNamespace(plain=1)
    setattr(space, "a.b.c", 2)
    setattr(space, "a.d", 3)
    assert space.a.b.c == 2
    assert vars(space.a) == {"b": NestedNamespace(c=2), "d": 3}
    for other in (copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert other == space
        assert other.a is not space.a
    with pytest.raises(AttributeError, match=r"'plain.b' cannot be set: 'plain' is 1"):
        setattr(space, "plain.b", 2)


def test_parsing_fills_a_used_namespace_with_defaults_again() -> None:
    args = parsed(["--window-size", "9"], "local")
    parser = argparse.ArgumentParser()
    add_attn_specific_args(parser, "local")
    assert parser.parse_args([], namespace=args).attn_args.window_size == 4


def test_arguments_of_ones_own_can_be_nested_and_removed() -> None:
    parser = argparse.ArgumentParser()
    add_nested_argument(parser, "--enc-my-rank", struct_name="mine", prefix="enc", type=int, default=3)
    parser.add_argument("--other", default=5)
    assert parser.parse_args(["--enc-my-rank", "4"], namespace=NestedNamespace()).mine.my_rank == 4
    remove_argument(parser, "--other")
    remove_argument(parser, "mine.my_rank")
    assert parser.parse_args([], namespace=NestedNamespace()) == NestedNamespace()
    assert "other" not in parser.format_help()
    with pytest.raises(ValueError, match="the parser has no argument '--other'"):
        remove_argument(parser, "--other")


# ---------------------------------------------------------------------- modules

MODULES = [
    path
    for path in sorted((FOLDER / "efficient-attention").glob("*.safetensors"))
    if not path.stem.startswith(("model_", "fairseq_", "t5_", "performer_ortho"))
]


def built(fixture: Fixture) -> nn.Module:
    config = fixture.config
    name = config.pop("attn_name")
    if name == "causal_eva":
        config["attn_args"] = NestedNamespace(**config["attn_args"])
    allowed = efficient_attention.TimeFirstAttention.__init__.__annotations__ if name == "causal_eva" else config
    module = AttentionFactory.build_attention(name, {key: config[key] for key in config if key in allowed})
    return module.train(fixture.meta.get("training") == "true")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_load_compute_and_save_as_the_library(path) -> None:
    fixture = load(path)
    module, state = built(fixture), fixture.under("state.")
    host = nn.ModuleDict({"attn": module})
    host.load_state_dict({f"attn.{name}": value for name, value in state.items()})
    saved = host.state_dict()
    assert set(saved) == {f"attn.{name}" for name in state}
    for name, value in state.items():
        assert torch.equal(saved[f"attn.{name}"], value), name

    x, mask = fixture["input"], fixture.tensors.get("key_padding_mask")
    padding = torch.zeros(x.shape[:-1], dtype=torch.bool) if mask is None else mask.bool().view(x.shape[:-1])
    grid = (x.shape[1], x.shape[2]) if x.dim() == 4 else None
    if mask is not None and not follows_original(fixture.config, padding.flatten(1), grid):
        return
    golden = fixture["output"] if "output" in fixture else fixture["output_parallel"]
    valid = ~padding & ~padding.flatten(1).all(1).view(-1, *[1] * (padding.dim() - 1))
    with replay(fixture), torch.no_grad():
        y = called(module, x, mask)
    assert_close(y[valid], golden[valid], OUTPUT_TOLERANCE, "output")


def called(module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    if not isinstance(module, efficient_attention.TimeFirstAttention):
        return module(x, key_padding_mask=mask)
    time_first = x.transpose(0, 1)  # these fixtures are stored batch first
    y, weights = module(time_first, time_first, time_first, key_padding_mask=mask, need_weights=False)
    assert weights is None
    return y.transpose(0, 1)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float32])
def test_masks_of_any_type_mean_the_same(kind: torch.dtype) -> None:
    attention = AttentionFactory.build_attention("softmax", {"dim": 8, "num_heads": 2}).eval()
    x, mask = torch.randn(2, 5, 8), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    assert_close(attention(x, mask.to(kind))[0, :3], attention(x[:, :3])[0], OUTPUT_TOLERANCE, "without the padding")


def test_a_sequence_is_a_square_where_windows_are_on_a_grid() -> None:
    attention = AttentionFactory.attn_dict["local"](dim=8, num_heads=2, attn_2d=True, use_rpe=True).eval()
    x = torch.randn(2, 36, 8)
    assert torch.equal(attention(x).view(2, 6, 6, 8), attention(x.view(2, 6, 6, 8)))
    with pytest.raises(ValueError, match="a square number of tokens, got 35"):
        attention(x[:, :35])


def test_what_does_not_exist_is_refused_by_name() -> None:
    size = {"dim": 8, "num_heads": 2}
    with pytest.raises(KeyError, match="no attention is called 'evaa'; did you mean 'eva'"):
        AttentionFactory.build_attention("evaa", size)
    with pytest.raises(KeyError, match="no attention is called 'evaa'"):
        add_attn_specific_args(argparse.ArgumentParser(), "evaa")
    with pytest.raises(TypeError, match="eva has no argument 'windowsize'; did you mean 'window_size'"):
        AttentionFactory.build_attention("eva", {**size, "windowsize": 4})
    with pytest.raises(TypeError, match="needs the argument 'num_heads'"):
        AttentionFactory.build_attention("eva", {"dim": 8})
    with pytest.raises(
        ValueError,
        match=r"adaptive_proj \(--adaptive-proj\) must be one of .*, got 'no_ln'; did you mean 'no-ln'",
    ):
        AttentionFactory.build_attention("eva", {**size, "adaptive_proj": "no_ln"})
    with pytest.raises(ValueError, match=r"sample_scheme \(--sample-scheme\) must be one of"):
        AttentionFactory.build_attention("performer", {**size, "sample_scheme": "twice"})


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lara", {"mis_type": "opt"}, "mis_type (--mis-type) must be one of mis-opt, mis-bh, mis-biased, got 'opt'"),
        ("lara", {"pool_module_type": "deep"}, "pool_module_type (--pool-module-type) must be one of light, dense"),
        ("lara", {"proposal_gen": "some"}, "proposal_gen (--proposal-gen) must be one of pool, no-param-pool"),
        ("lara", {"num_landmarks": 0}, "lara: num_landmarks (--num-landmarks): Input should be greater"),
        ("eva", {"window_size": -1}, "eva: window_size (--window-size): Input should be greater than or equal to 1"),
        ("performer", {"proj_method": "x"}, "performer: proj_method (--proj-method): Input should be 'favorp'"),
    ],
)
def test_wrong_values_are_named_in_the_callers_words(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionFactory.build_attention(name, {"dim": 8, "num_heads": 2, **given})


def test_causal_eva_says_which_arguments_it_takes() -> None:
    """The other mechanisms take dim and their options side by side, as the library's own factory does."""
    with pytest.raises(TypeError, match="causal_eva: 'dim' is called embed_dim") as no:
        AttentionFactory.build_attention("causal_eva", {"dim": 8, "num_heads": 2, "window_size": 4})
    for word in ("embed_dim", "num_heads", "attn_args", "window_size", "chunk_size"):
        assert word in str(no.value)
    with pytest.raises(TypeError, match="causal_eva: 'window_size' belongs into attn_args"):
        AttentionFactory.build_attention("causal_eva", {"embed_dim": 8, "num_heads": 2, "window_size": 4})


def test_causal_eva_refuses_what_it_cannot_do() -> None:
    own = {"adaptive_proj": "qk", "causal": True, "chunk_size": 2}
    size = {"embed_dim": 8, "num_heads": 2, "attn_args": own}
    with pytest.raises(TypeError, match="needs the argument 'attn_args'"):
        AttentionFactory.build_attention("causal_eva", {"embed_dim": 8, "num_heads": 2})
    with pytest.raises(TypeError, match="causal_eva has no argument 'chunks'"):
        AttentionFactory.build_attention("causal_eva", {**size, "attn_args": {"chunks": 2}})
    with pytest.raises(ValueError, match="kdim and vdim equal to embed_dim"):
        AttentionFactory.build_attention("causal_eva", {**size, "kdim": 4})
    attention = AttentionFactory.build_attention("causal_eva", size)
    x = torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="the same tensor as query, key and value"):
        attention(x, torch.randn(5, 1, 8), x)
    with pytest.raises(ValueError, match=r"stream with `module.mixer.init_state`"):
        attention(x, x, x, incremental_state={})
    own_keys = AttentionFactory.build_attention("causal_eva", {**size, "self_attention": True}).eval()
    assert torch.equal(own_keys(x, None, None)[0], own_keys(x, torch.randn(5, 1, 8), None)[0])


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_copy_saves_and_loads_like_the_first(name: str) -> None:
    own = {"adaptive_proj": "qk", "causal": True, "chunk_size": 2}
    size = {"embed_dim": 8, "num_heads": 2, "attn_args": own} if name == "causal_eva" else {"dim": 8, "num_heads": 2}
    first = AttentionFactory.build_attention(name, size)
    second = copy.deepcopy(AttentionFactory.build_attention(name, size))
    second.load_state_dict(first.state_dict())
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, other)
    incomplete = first.state_dict()
    incomplete.popitem()
    with pytest.raises(RuntimeError, match="Missing key"):
        second.load_state_dict(incomplete)
