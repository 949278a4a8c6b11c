"""Text classifiers in the format of Hugging Face."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from subquad.interop.huggingface.base import SubquadModel, build_output, mask_to_padding
from subquad.interop.huggingface.text import embedding_table
from subquad.models import TextClassifier
from subquad.tasks.losses import class_loss


class SubquadForSequenceClassification(SubquadModel):
    """tokens (batch, time) -> logits (batch, classes). A text begins after `eos`."""

    main_input_name = "input_ids"
    kinds = ("text-classifier",)
    model: TextClassifier
    usage = """```python
import subquad.interop.huggingface  # makes the model known
from transformers import pipeline

pipeline("text-classification", "FOLDER")("A text", truncation=True)
```"""

    def get_input_embeddings(self) -> nn.Module:
        return embedding_table(self.model.embedding)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """attention_mask: 1 for tokens and 0 for padding, which may be anywhere.

        labels: (batch,) class numbers, or (batch, classes) probabilities.
        """
        padding = mask_to_padding(attention_mask, input_ids.shape[1])
        logits, _, aux = self.model(input_ids, padding=padding)
        loss = self.mean_loss(class_loss(logits, labels), aux, num_items_in_batch) if labels is not None else None
        return build_output(SequenceClassifierOutput, return_dict, loss=loss, logits=logits)
