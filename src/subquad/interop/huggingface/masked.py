"""Masked language models in the format of Hugging Face."""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from subquad.interop.huggingface.base import IGNORED
from subquad.interop.huggingface.hidden_states import record_hidden_states
from subquad.interop.huggingface.inputs import check_positions, mask_to_padding, tokens_or_vectors
from subquad.interop.huggingface.text_model import SubquadTextModel
from subquad.models import MaskedLanguageModel
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
