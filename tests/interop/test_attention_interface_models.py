"""Every language model of transformers that asks the AttentionInterface for its attention gets ours, or a refusal."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.interop.patching.attention_interface import MORE_THAN_HEADS, MORE_THAN_MASKS
from subquad.testing import close
from tests.interop.swap_hosts import VOCABULARY, tokens_and_mask, transformers

from transformers.models.auto import modeling_auto  # isort: skip
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # isort: skip

pytestmark = pytest.mark.nightly

NAMES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES")
KINDS = {
    name if isinstance(name, str) else name[0]: kind
    for names in NAMES
    for kind, name in getattr(modeling_auto, names).items()
}
CAUSAL = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
LARGEST = 10**7
REASONS = (*MORE_THAN_HEADS.values(), *MORE_THAN_MASKS.values())
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32)
SIZES |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), 2)
SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4)
SIZES |= dict.fromkeys(("intermediate_size", "hidden_dim", "decoder_ffn_dim", "ffn_dim"), 48)
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "eos_token_id": None, "sliding_window": None}
SIZES |= {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
VARIANTS: list[tuple[set[str], dict[str, Any]]] = [
    (set(), {}),
    ({"sliding_window"}, {}),
    ({"head_dim"}, {}),
    ({"sliding_window", "head_dim"}, {}),
    ({"num_key_value_heads"}, {}),
    (set(), {"sliding_window": 64}),
    ({"head_dim"}, {"num_key_value_heads": 4, "sliding_window": 64}),
    ({"sliding_window"}, {"layer_types": ["full_attention"] * 2}),
    ({"head_dim", "sliding_window", "num_key_value_heads"}, LATENT),
]
"""Sizes that are left out, and other ones: the first that a class of configs accepts, and its model runs with."""


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    subquad.register_attention("subquad_whole", "local", window=64)
    subquad.register_attention("subquad_local_4", "local", window=4)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def build(name: str) -> Any:
    """A tiny model of that class. The test is skipped where no sizes above make one."""
    problem: Exception | None = None
    for left_out, other in VARIANTS:
        sizes = {key: value for key, value in SIZES.items() if key not in left_out} | other
        try:
            model = build_with(sizes | {"is_decoder": name in CAUSAL}, name)
            logits(model, *tokens_and_mask())
            return model
        except Exception as error:  # of transformers, in any form
            problem = problem or error
    pytest.skip(f"{type(problem).__name__}: {problem}")


def build_with(sizes: dict[str, Any], name: str) -> Any:
    kind: Any = CONFIG_MAPPING[KINDS[name]]
    known = {*inspect.signature(kind).parameters, *getattr(kind, "__dataclass_fields__", {}), *kind.attribute_map}
    config = kind(**{key: value for key, value in sizes.items() if key in known})
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in getattr(transformers, name)(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters in spite of the sizes")
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


@torch.no_grad()
def logits(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    return model(tokens, attention_mask=mask).logits.float()


def refusal(model: Any, tokens: Tensor, mask: Tensor) -> str | None:
    try:
        logits(model, tokens, mask)
    except ValueError as error:
        return str(error)
    return None


def padding_changes(model: Any, tokens: Tensor, mask: Tensor) -> bool:
    """Whether the row with padding has other logits alone; some models take positions from the mask only if told."""
    keep = mask[1].bool()
    return not close(logits(model, tokens, mask)[1, keep], logits(model, tokens[1:, keep], mask[1:, keep])[0])


def cache_changes(model: Any, tokens: Tensor, mask: Tensor) -> bool:
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    first, second = (model.generate(tokens, use_cache=cache, **settings).logits for cache in (True, False))
    return not close(torch.stack(first), torch.stack(second))


@pytest.mark.parametrize(
    "name",
    sorted(name for name in KINDS if getattr(getattr(transformers, name, None), "_supports_attention_backend", False)),
)
def test_a_model_has_the_attention_of_before_or_is_refused(name: str) -> None:
    """A window over everything changes nothing; a small one gives padded rows and cached tokens what they have alone.

    Where padding or a cache changes what the model's own attention gives, it may do so here.
    """
    model = build(name)
    tokens, mask = tokens_and_mask("left" if name in CAUSAL else "right")
    before = logits(model, tokens, mask)[mask.bool()]
    own = padding_changes(model, tokens, mask), name in CAUSAL and cache_changes(model, tokens, mask)
    model.set_attn_implementation("subquad_whole")
    if refused := refusal(model, tokens, mask):
        assert refused.endswith(REASONS)
        return
    assert close(logits(model, tokens, mask)[mask.bool()], before)
    model.set_attn_implementation("subquad_local_4")
    assert own[0] or not padding_changes(model, tokens, mask)
    assert own[1] or name not in CAUSAL or not cache_changes(model, tokens, mask)
