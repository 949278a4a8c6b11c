"""Language models and encoder-decoders in the format of Hugging Face, with `generate` over our streaming states."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from subquad.interop.huggingface.arguments import (
    HiddenStates,
    check_positions,
    mask_to_padding,
    record_hidden_states,
    tokens_or_vectors,
)
from subquad.interop.huggingface.base import IGNORED
from subquad.interop.huggingface.cache import SubquadCache, choose_cache
from subquad.interop.huggingface.text_model import SubquadTextModel
from subquad.models import LanguageModel, Seq2Seq
from subquad.models.base import mean_aux
from subquad.nn.block import Block
from subquad.tasks.losses import logit_loss


class SubquadGenerator(SubquadTextModel, GenerationMixin):
    """A model that generates text. It reads token by token if all mechanisms of its decoder can stream."""

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

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *inputs: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepares a call as the base class does, without positions, which the model counts by itself."""
        base: Any = super()
        prepared = base.prepare_inputs_for_generation(input_ids, *inputs, inputs_embeds=inputs_embeds, **kwargs)
        return {name: value for name, value in prepared.items() if name != "position_ids"}


class SubquadForCausalLM(SubquadGenerator):
    """tokens (batch, time) -> logits of the next token (batch, time, vocabulary). A text begins after `eos`."""

    kinds = ("language-model",)
    model: LanguageModel
    usage = """```python
from transformers import pipeline

# trust_remote_code=True is not needed after `import subquad.interop.huggingface`
pipe = pipeline("text-generation", "FOLDER", trust_remote_code=True)
print(pipe("A text", max_new_tokens=50))
```"""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002 - no mechanism gives any
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """attention_mask: 1 for tokens and 0 for padding, which may be anywhere. Masks of earlier calls may come first.

        labels: the same as input_ids, with -100 where nothing is learned. logits_to_keep: how many of the last
        positions get logits, or a tensor of the positions that do; with 0 all do.
        """
        tokens = tokens_or_vectors(input_ids, inputs_embeds)
        batch, time = tokens.shape[:2]
        padding = mask_to_padding(attention_mask, time)
        cache = choose_cache(past_key_values, use_cache)
        check_positions(position_ids, cache_position, padding, cache, tokens)
        if cache is not None and cache.state is None:
            cache.state = self.model.init_state(batch, tokens.device)
        with record_hidden_states(self.model, self.records_hidden_states(output_hidden_states)) as hidden:
            x, state, aux = self.model.features(tokens, padding, cache.state if cache is not None else None)
        if cache is not None:
            cache.advance(state, time)
        logits = self.model.head(x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep])
        loss = None
        if labels is not None:
            found = logit_loss(logits[:, :-1], labels[:, 1:], pad=IGNORED)
            loss = self.mean_loss(found, mean_aux(aux), num_items_in_batch)
        return self.build_output(
            CausalLMOutputWithPast,
            return_dict,
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=hidden.get(self.model.decoder),
        )


class SubquadForSeq2SeqLM(SubquadGenerator):
    """source (batch, time), target (batch, time') -> logits of the next target token (batch, time', vocabulary).

    A source ends with `eos`, and a target begins after one.
    """

    kinds = ("encoder-decoder",)
    input_embedding = "source"
    model: Seq2Seq
    usage = """```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

# trust_remote_code=True is not needed after `import subquad.interop.huggingface`
model = AutoModelForSeq2SeqLM.from_pretrained("FOLDER", trust_remote_code=True)
source = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
target = AutoTokenizer.from_pretrained("FOLDER", subfolder="target", trust_remote_code=True)
found = model.generate(**source(["A sentence."], return_tensors="pt", padding=True))
print(target.batch_decode(found, skip_special_tokens=True))
```"""

    @property
    def vocab_fields(self) -> tuple[str, ...]:  # type: ignore[override]  # it depends on the model here
        return ("source_vocab", "target_vocab") if self.model.config.shared_embedding else ("source_vocab",)

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Changes the number of target tokens, where source and target have vocabularies of their own."""
        if self.model.config.shared_embedding:
            raise ValueError("source and target share one embedding; resize_token_embeddings resizes it")
        target = self.model.target
        return self._resize(target, ("target_vocab",), new_num_tokens, pad_to_multiple_of, mean_resizing)

    def get_encoder(self, modality: str | None = None) -> "Encoder":  # noqa: ARG002 - there is one
        return Encoder(self)

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
        encoder_outputs: BaseModelOutput | tuple[Any, ...] | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002 - no mechanism gives any
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Masks have 1 for tokens and 0 for padding, which may be anywhere.

        labels: the target with its eos, and -100 where nothing is learned. encoder_outputs: those of `get_encoder`, in
        place of input_ids. decoder_input_ids: by default they follow from the labels.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("give decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        target = tokens_or_vectors(decoder_input_ids, decoder_inputs_embeds, "decoder_")
        records = self.records_hidden_states(output_hidden_states)
        encoder_aux, encoder_hidden = None, None
        if encoder_outputs is None:
            source = tokens_or_vectors(input_ids, inputs_embeds)
            context, encoder_hidden, encoder_aux = self.encode(source, attention_mask, records)
        else:
            context = encoder_outputs[0]
            if isinstance(encoder_outputs, BaseModelOutput):
                encoder_hidden = encoder_outputs.hidden_states
        cache = choose_cache(past_key_values, use_cache)
        check_positions(None, cache_position, None, cache, target)
        with record_hidden_states(self.model.decoder, records) as hidden:
            x, decoder_aux = self._decode(target, context, decoder_attention_mask, attention_mask, cache)
        logits, loss = self.model.head(x), None
        if labels is not None:
            found = logit_loss(logits, labels, pad=IGNORED)
            loss = self.mean_loss(found, mean_aux(encoder_aux, decoder_aux), num_items_in_batch)
        return self.build_output(
            Seq2SeqLMOutput,
            return_dict,
            loss=loss,
            logits=logits,
            past_key_values=cache,
            decoder_hidden_states=hidden.get(self.model.decoder),
            encoder_last_hidden_state=context,
            encoder_hidden_states=encoder_hidden,
        )

    def encode(
        self, source: Tensor, mask: Tensor | None, records: bool
    ) -> tuple[Tensor, HiddenStates | None, Tensor | None]:
        """Returns the context (batch, time, dim), the hidden states if they are recorded, and the regulariser."""
        with record_hidden_states(self.model.encoder, records) as hidden:
            context, _, aux = self.model.encode(source, mask_to_padding(mask, source.shape[1]))
        return context, hidden.get(self.model.encoder), aux

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

    main_input_name = "input_ids"

    def __init__(self, model: SubquadForSeq2SeqLM) -> None:
        super().__init__()
        self.owner = [model]  # a list, so that the model is not registered a second time

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002 - no mechanism gives any
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple[Any, ...]:
        model = self.owner[0]
        source = tokens_or_vectors(input_ids, inputs_embeds)
        context, hidden, _ = model.encode(source, attention_mask, model.records_hidden_states(output_hidden_states))
        return model.build_output(BaseModelOutput, return_dict, last_hidden_state=context, hidden_states=hidden)
