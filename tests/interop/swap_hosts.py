"""Tiny models of transformers whose attention is swapped in tests, with weights that make it far from uniform."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad.interop.patching.host import SwappedAttention
from subquad.packages import require_torchvision

require_torchvision()  # transformers imports it, also where it was built for another torch
transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

LENGTH, VOCABULARY = 11, 40
DECODER = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
DECODER |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
FULL = ["full_attention", "full_attention"]

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "gemma": ("GemmaForCausalLM", DECODER | {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        DECODER | {"query_pre_attn_scalar": 5, "attn_logit_softcapping": None, "layer_types": FULL},
    ),
    "gemma3": ("Gemma3ForCausalLM", DECODER | {"query_pre_attn_scalar": 5, "layer_types": FULL}),
    "olmo2": ("Olmo2ForCausalLM", DECODER),
    "smollm3": ("SmolLM3ForCausalLM", DECODER),
    "granite": ("GraniteForCausalLM", DECODER | {"attention_multiplier": 0.3}),
}

LATENT: dict[str, Any] = DECODER | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
LATENT |= {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
OTHER_WIDTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT | {"v_head_dim": 8}),
    "deepseek_v3, wider values": ("DeepseekV3ForCausalLM", LATENT | {"v_head_dim": 24}),
}
"""Decoders whose values have another width than queries and keys: latent attention."""

ENCODER = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0}
MODERNBERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODERNBERT |= {"sep_token_id": 2, "max_position_embeddings": 64}
BART: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2}
BART |= {"forced_eos_token_id": None, "max_position_embeddings": 64}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("ModernBertModel", ENCODER | MODERNBERT | {"layer_types": FULL}),
    "distilbert": ("DistilBertModel", ENCODER | {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
}
T5: dict[str, Any] = {"d_model": 24, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
T5 |= {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
TRANSLATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", ENCODER | BART),
    "t5": ("T5ForConditionalGeneration", T5),
}

BERT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 1}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
IMAGES |= {"image_size": 8, "patch_size": 2, "num_channels": 1}
REPLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", BERT),
    "roberta": ("RobertaModel", BERT),
    "vit": ("ViTModel", IMAGES),
    "deit": ("DeiTModel", IMAGES),
    "gpt2": ("GPT2LMHeadModel", GPT2),
}
"""Models of whose layers a mixer takes the whole place."""
SWIN: dict[str, Any] = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2]}
SWIN |= {"window_size": 4, "num_channels": 1}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2, capped logits": ("Gemma2ForCausalLM", DECODER | {"layer_types": FULL}),
    "swin": ("SwinModel", SWIN),
}
"""Models whose attention is more than queries, keys and values."""
HOSTS = DECODERS | {"deepseek_v3": OTHER_WIDTHS["deepseek_v3"]} | ENCODERS | TRANSLATORS | REPLACED | REFUSED


def disturbed(model: nn.Module) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tiny(kind: str, settings: dict[str, Any]) -> Any:
    model = getattr(transformers, kind)
    torch.manual_seed(0)
    return disturbed(model(model.config_class(**settings)))


def tokens_and_mask(side: str = "left", rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens of which the last row has 4 less than the others, padded on one side."""
    tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[-1, slice(None, 4) if side == "left" else slice(-4, None)] = 0
    return tokens, mask


def inputs(host: str) -> dict[str, Tensor]:
    """Something for the model of that name to read."""
    if "image_size" in HOSTS[host][1]:
        size = HOSTS[host][1]["image_size"]
        return {"pixel_values": torch.randn(2, 1, size, size, generator=torch.Generator().manual_seed(0))}
    tokens, mask = tokens_and_mask("right")
    decoder = {"decoder_input_ids": tokens} if host in TRANSLATORS else {}
    return {"input_ids": tokens, "attention_mask": mask} | decoder


def timm_vit() -> Any:
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 4}
    return disturbed(timm.create_model("vit_tiny_patch16_224", **sizes, num_classes=10))


def timm_swin() -> Any:
    return timm.create_model("swin_tiny_patch4_window7_224", embed_dim=8, depths=(1,), num_heads=(2,))


def torch_encoder(**options: Any) -> Any:
    layer = nn.TransformerEncoderLayer(16, 4, 32, **{"batch_first": True} | options)
    return disturbed(nn.TransformerEncoder(layer, 2, enable_nested_tensor=bool(options.get("batch_first", True))))


def mixers(model: nn.Module) -> list[Any]:
    return [module.mixer for module in model.modules() if isinstance(module, SwappedAttention)]
