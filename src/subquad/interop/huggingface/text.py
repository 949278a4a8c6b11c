"""Language models and encoder-decoders in the format of Hugging Face, with `generate` over our streaming states."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from subquad.interop.huggingface.base import IGNORED, SubquadModel, build_output, choose_cache, mask_to_padding
from subquad.interop.huggingface.cache import SubquadCache
from subquad.models import LanguageModel, Seq2Seq
from subquad.models.base import mean_aux
from subquad.nn.block import Block
from subquad.nn.embeddings import TokenEmbedding
from subquad.tasks.losses import logit_loss


class SubquadGenerator(SubquadModel, GenerationMixin):
    """A model that generates text. It reads token by token if all mechanisms of its decoder can stream."""

    main_input_name = "input_ids"
    model: LanguageModel | Seq2Seq

    @property
    def streams(self) -> bool:
        """Whether every mechanism of the decoder can stream with its options."""
        mixers = [cast(Block, block).mixer for block in self.model.decoder.blocks]
        return all(mixer.can_stream for mixer in mixers)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """Generates as the base class does, with our state as the cache if all mechanisms can stream."""
        given = options.get("generation_config", inputs[1] if len(inputs) > 1 else None)
        chosen = given if given is not None else self.generation_config
        if not self.streams:
            options["use_cache"] = False
        elif options.get("use_cache", chosen.use_cache) is not False and options.get("past_key_values") is None:
            options["past_key_values"] = SubquadCache()
        base: Any = super()
        return base.generate(*inputs, **options)


class SubquadForCausalLM(SubquadGenerator):
    """tokens (batch, time) -> logits of the next token (batch, time, vocabulary). A text begins after `eos`."""

    kinds = ("language-model",)
    model: LanguageModel
    usage = """```python
import subquad.interop.huggingface  # makes the model known
from transformers import pipeline

pipeline("text-generation", "FOLDER")("A text", max_new_tokens=50)
```"""

    def get_input_embeddings(self) -> nn.Module:
        return embedding_table(self.model.embedding)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """attention_mask: 1 for tokens and 0 for padding, which may be anywhere. Masks of earlier calls may come first.

        labels: the same as input_ids, with -100 where nothing is learned. logits_to_keep: how many of the last
        positions get logits; with 0 all positions do.
        """
        time = input_ids.shape[1]
        cache = choose_cache(past_key_values, use_cache)
        if cache is not None and cache.state is None:
            cache.state = self.model.init_state(input_ids.shape[0], input_ids.device)
        x, state, aux = self.model.features(
            input_ids, mask_to_padding(attention_mask, time), cache.state if cache is not None else None
        )
        if cache is not None:
            cache.advance(state, time)
        logits = self.model.head(x[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            found = logit_loss(logits[:, :-1], labels[:, 1:], pad=IGNORED)
            loss = self.mean_loss(found, mean_aux(aux), num_items_in_batch)
        return build_output(CausalLMOutputWithPast, return_dict, loss=loss, logits=logits, past_key_values=cache)


class SubquadForSeq2SeqLM(SubquadGenerator):
    """source (batch, time), target (batch, time') -> logits of the next target token (batch, time', vocabulary).

    A source ends with `eos`, and a target begins after one.
    """

    kinds = ("encoder-decoder",)
    model: Seq2Seq
    usage = """```python
import subquad.interop.huggingface  # makes the model known
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("FOLDER")
source = AutoTokenizer.from_pretrained("FOLDER")
target = AutoTokenizer.from_pretrained("FOLDER", subfolder="target")
found = model.generate(**source(["A sentence."], return_tensors="pt", padding=True))
print(target.batch_decode(found, skip_special_tokens=True))
```"""

    def get_input_embeddings(self) -> nn.Module:
        return embedding_table(self.model.source)

    def get_encoder(self, modality: str | None = None) -> "Encoder":  # noqa: ARG002 - there is one
        return Encoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns what the decoder reads to predict `labels`: the same tokens, shifted by one."""
        begin, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if begin is None or pad is None:
            raise ValueError("the config has no decoder_start_token_id or no pad_token_id; give decoder_input_ids")
        first = labels.new_full((labels.shape[0], 1), begin)
        return torch.cat([first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad)], 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: SubquadCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Masks have 1 for tokens and 0 for padding, which may be anywhere.

        labels: the target with its eos, and -100 where nothing is learned. encoder_outputs: those of `get_encoder`, in
        place of input_ids. decoder_input_ids: by default they follow from the labels.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        encoder_aux = None
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("give input_ids or encoder_outputs")
            context, _, encoder_aux = self.model.encode(input_ids, mask_to_padding(attention_mask, input_ids.shape[1]))
            encoder_outputs = (context,)
        cache = choose_cache(past_key_values, use_cache)
        x, decoder_aux = self._decode(
            decoder_input_ids, encoder_outputs[0], decoder_attention_mask, attention_mask, cache
        )
        logits, loss = self.model.head(x), None
        if labels is not None:
            found = logit_loss(logits, labels, pad=IGNORED)
            loss = self.mean_loss(found, mean_aux(encoder_aux, decoder_aux), num_items_in_batch)
        return build_output(
            Seq2SeqLMOutput,
            return_dict,
            loss=loss,
            logits=logits,
            past_key_values=cache,
            encoder_last_hidden_state=encoder_outputs[0],
        )

    def _decode(
        self,
        target: Tensor,
        context: Tensor,
        mask: Tensor | None,
        context_mask: Tensor | None,
        cache: SubquadCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the input of the head, and the regulariser. A cache keeps the context of its first call."""
        time = target.shape[1]
        padding = mask_to_padding(mask, time)
        if cache is not None and cache.state is not None:
            x, state, aux = self.model.features(target, None, padding, None, cache.state)
        else:
            state = self.model.init_state(target.shape[0], target.device) if cache is not None else None
            context_padding = mask_to_padding(context_mask, context.shape[1])
            x, state, aux = self.model.features(target, context, padding, context_padding, state)
        if cache is not None:
            cache.advance(state, time)
        return x, aux


class Encoder(nn.Module):
    """The encoder of a model. `generate` calls it once."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.owner = [model]  # a list, so that the model is not registered a second time

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        context: Any = self.owner[0].encode(input_ids, mask_to_padding(attention_mask, input_ids.shape[1])).x
        return BaseModelOutput(last_hidden_state=context)


def embedding_table(embedding: TokenEmbedding) -> nn.Module:
    """Returns the table of token embeddings, which may be shared."""
    return embedding.shared[0] if embedding.shared else embedding.tokens
