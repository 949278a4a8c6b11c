"""The config.json of a model in the format of Hugging Face: our model config, and what transformers requires."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig


class SubquadConfig(PretrainedConfig):
    """The config of a model of any kind. `subquad` is our config (see `subquad.models.build_from_config`)."""

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
        """aux_weight: the weight of the mixers' regulariser in the loss of a target. common: see PretrainedConfig."""
        self.subquad = dict(subquad or {})
        self.aux_weight = aux_weight
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self.decoder_start_token_id = decoder_start_token_id
        common["is_encoder_decoder"] = self.subquad.get("kind") == "encoder-decoder"
        common["tie_word_embeddings"] = False  # our models tie weights themselves, and store them once
        super().__init__(**common)

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary that the model predicts, or None if it predicts classes."""
        return self.subquad.get("target_vocab", self.subquad.get("vocab"))

    @property
    def hidden_size(self) -> int | None:
        """The width of the head's input, which is the width of the last stage in a pyramid."""
        stages = self.subquad.get("stages")
        return stages[-1]["dim"] if stages else self.subquad.get("dim")
