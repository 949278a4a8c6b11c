"""The config.json of a model in Hugging Face's format: our resolved config, and what transformers asks of all."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig


class SubquadConfig(PretrainedConfig):
    """A model of any kind. `subquad` is what rebuilds it (see `subquad.models.model_from`)."""

    model_type = "subquad"

    def __init__(
        self,
        subquad: Mapping[str, Any] | None = None,
        aux_weight: float = 0.0,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        decoder_start_token_id: int | None = None,
        **common: Any,
    ) -> None:
        """aux_weight: of the mixers' regulariser beside the loss of a target. common: see PretrainedConfig."""
        self.subquad = dict(subquad or {})
        self.aux_weight = aux_weight
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self.decoder_start_token_id = decoder_start_token_id
        common["is_encoder_decoder"] = self.subquad.get("kind") == "encoder-decoder"
        common["tie_word_embeddings"] = False  # our models tie by themselves, and store what is tied once
        super().__init__(**common)

    @property
    def vocab_size(self) -> int | None:
        """Number of symbols that the model writes; None: it writes classes."""
        return self.subquad.get("target_vocab", self.subquad.get("vocab"))

    @property
    def hidden_size(self) -> int | None:
        """Width of what the head reads; of a pyramid that of its last stage."""
        stages = self.subquad.get("stages")
        return stages[-1]["dim"] if stages else self.subquad.get("dim")
