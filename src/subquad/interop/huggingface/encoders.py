"""Models that read a text both ways, in the format of Hugging Face: masked language models and text classifiers."""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput

from subquad.interop.huggingface.arguments import (
    check_positions,
    mask_to_padding,
    record_hidden_states,
    tokens_or_vectors,
)
from subquad.interop.huggingface.base import IGNORED
from subquad.interop.huggingface.text_model import SubquadTextModel
from subquad.models import MaskedLanguageModel, TextClassifier
from subquad.models.base import mean_aux
from subquad.tasks.losses import logit_loss


class SubquadForMaskedLM(SubquadTextModel):
    """tokens (batch, time) -> logits of the token that is hidden at each position (batch, time, vocabulary)."""

    kinds = ("masked-language-model",)
    model: MaskedLanguageModel
    usage = """```python
from transformers import pipeline

# trust_remote_code=True is not needed after `import subquad.interop.huggingface`
pipe = pipeline("fill-mask", "FOLDER", trust_remote_code=True)
print(pipe(f"A {pipe.tokenizer.mask_token} text"))
```"""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002 - no mechanism gives any
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """attention_mask: 1 for tokens and 0 for padding, which may be anywhere.

        labels: (batch, time) the tokens that are hidden, with -100 where nothing is learned.
        """
        tokens = tokens_or_vectors(input_ids, inputs_embeds)
        padding = mask_to_padding(attention_mask, tokens.shape[1])
        check_positions(position_ids, None, padding, None, tokens)
        with record_hidden_states(self.model, self.records_hidden_states(output_hidden_states)) as hidden:
            x, _, aux = self.model.features(tokens, padding)
        logits = self.model.head(self.model.head_inputs(x))
        loss = None
        if labels is not None:
            loss = self.mean_loss(logit_loss(logits, labels, pad=IGNORED), mean_aux(aux), num_items_in_batch)
        return self.build_output(
            MaskedLMOutput, return_dict, loss=loss, logits=logits, hidden_states=hidden.get(self.model.encoder)
        )


class SubquadForSequenceClassification(SubquadTextModel):
    """tokens (batch, time) -> logits (batch, classes). A text begins after `eos`."""

    kinds = ("text-classifier",)
    model: TextClassifier
    usage = """```python
from transformers import pipeline

# trust_remote_code=True is not needed after `import subquad.interop.huggingface`
pipe = pipeline("text-classification", "FOLDER", trust_remote_code=True)
print(pipe("A text", truncation=True))
```"""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002 - no mechanism gives any
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """attention_mask: 1 for tokens and 0 for padding, which may be anywhere.

        labels: (batch,) class numbers, or (batch, classes) probabilities.
        """
        tokens = tokens_or_vectors(input_ids, inputs_embeds)
        padding = mask_to_padding(attention_mask, tokens.shape[1])
        check_positions(position_ids, None, padding, None, tokens)
        with record_hidden_states(self.model, self.records_hidden_states(output_hidden_states)) as hidden:
            logits, _, aux = self.model(tokens, padding=padding)
        return self.build_output(
            SequenceClassifierOutput,
            return_dict,
            loss=self.class_loss(logits, labels, aux, num_items_in_batch),
            logits=logits,
            hidden_states=hidden.get(self.model.encoder),
        )
