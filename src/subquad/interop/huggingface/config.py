"""The config.json of a model in the format of Hugging Face: our model config, and what transformers requires."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from subquad.interop.remote_code import InstalledClass, model_auto_map


class SubquadConfig(InstalledClass, PretrainedConfig):
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
        kind = self.subquad.get("kind")
        common["is_encoder_decoder"] = kind == "encoder-decoder"
        common["tie_word_embeddings"] = self.ties_head  # our models tie weights themselves, and store them once
        common["auto_map"] = model_auto_map(kind)
        if "num_classes" in self.subquad and not common.get("id2label"):
            common.setdefault("num_labels", self.subquad["num_classes"])
        super().__init__(**common)

    @property
    def ties_head(self) -> bool:
        """Whether the head has the weights of the input's embedding, and not of another embedding for the target."""
        return bool(self.subquad.get("head", {}).get("tied", False) and self.subquad.get("shared_embedding", True))

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary that the model predicts, or reads if it predicts classes. Images have none."""
        return self.subquad.get("target_vocab", self.subquad.get("vocab"))

    @property
    def hidden_size(self) -> int | None:
        """The width of the head's input, which is the width of the last stage in a pyramid."""
        stages = self.subquad.get("stages")
        return stages[-1]["dim"] if stages else self.subquad.get("dim")

    @property
    def num_hidden_layers(self) -> int:
        """The number of blocks of the decoder or, without one, of the encoder or all stages."""
        return sum(stack["layers"] for stack in self._stacks())

    @property
    def num_attention_heads(self) -> int | None:
        stacks = self._stacks()
        return stacks[-1]["heads"] if stacks else None

    def _stacks(self) -> list[Mapping[str, Any]]:
        one = self.subquad.get("decoder", self.subquad.get("encoder"))
        return [one] if one is not None else list(self.subquad.get("stages", ()))
