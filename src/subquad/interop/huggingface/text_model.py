"""What models that read tokens share: the tables of their embeddings, which users read, replace and resize."""

from typing import Any

import torch
from torch import Tensor, nn

from subquad.interop.huggingface.base import SubquadModel
from subquad.nn.embeddings import TokenEmbedding
from subquad.nn.heads import WordHead

PREDICTED = frozenset({"vocab", "target_vocab"})
"""The fields of configs that count the tokens which a head predicts."""


class SubquadTextModel(SubquadModel):
    """The base class of models that read tokens. Tables that our models tie stay tied, whatever is done to them."""

    main_input_name = "input_ids"
    input_embedding = "embedding"
    """The attribute of the model that embeds its input."""
    vocab_fields: tuple[str, ...] = ("vocab",)
    """The fields of the model's config that count the tokens of its input."""

    @property
    def _input(self) -> TokenEmbedding:
        embedding = getattr(self.model, self.input_embedding)
        assert isinstance(embedding, TokenEmbedding)
        return embedding

    def get_input_embeddings(self) -> nn.Module:
        return self._input.table

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the table of tokens wherever it is used: in the other embedding and in the head if they share it."""
        old = self._input.table
        if not (isinstance(value, nn.Embedding) and isinstance(old, nn.Embedding)):
            raise ValueError(
                f"an nn.Embedding can replace another; got {type(value).__name__} for {type(old).__name__}"
            )
        if value.weight.shape != old.weight.shape:
            raise ValueError(
                f"the table has {tuple(old.weight.shape)} numbers, the new one {tuple(value.weight.shape)}; "
                "resize_token_embeddings changes the number of tokens"
            )
        for module in self.model.modules():
            if isinstance(module, TokenEmbedding) and module.table is old:
                if module.shared:
                    module.shared = [value]
                else:
                    module.tokens = value
            elif isinstance(module, WordHead) and module.tied and module.tied[0] is old:
                module.tied = [value]

    def get_output_embeddings(self) -> nn.Module | None:
        """The head if it is a linear map to the vocabulary, with `weight` and `bias`; otherwise None."""
        head = getattr(self.model, "head", None)
        return head if isinstance(head, WordHead) else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Takes weight and bias of a linear map for the head, whose bias stays away if it had none."""
        head = self.get_output_embeddings()
        if new_embeddings is head:
            return
        weight = getattr(new_embeddings, "weight", None)
        if not isinstance(head, WordHead) or not isinstance(weight, Tensor) or weight.shape != head.weight.shape:
            raise ValueError("the output embeddings can only be replaced by a linear map of the same shape")
        bias = getattr(new_embeddings, "bias", None)
        if (bias is None) != (head.bias is None):
            raise ValueError(f"the head has {'no' if head.bias is None else 'a'} bias, and so must what replaces it")
        if head.tied and weight is not head.weight:
            raise ValueError("the head is tied to the input embeddings; set_input_embeddings replaces both")
        if not head.tied:
            head.register_parameter("weight", nn.Parameter(weight.detach()))
        if bias is not None:
            head.bias = nn.Parameter(bias.detach())

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Changes the number of tokens that the model reads and, where it predicts the same tokens, predicts.

        Tokens are added or removed at the end. With mean_resizing a new token is the mean of all others, so that it
        changes predictions little; otherwise it is drawn as in a new model. pad_to_multiple_of: rounds the number up.
        """
        return self._resize(self._input, self.vocab_fields, new_num_tokens, pad_to_multiple_of, mean_resizing)

    def _resize(
        self, embedding: TokenEmbedding, fields: tuple[str, ...], tokens: int | None, multiple: int | None, mean: bool
    ) -> nn.Embedding:
        table = embedding.table
        if not isinstance(table, nn.Embedding):
            raise ValueError("an adaptive embedding has bands of tokens, which cannot be resized")
        if tokens is None and multiple is None:
            return table
        size = tokens if tokens is not None else table.num_embeddings
        if multiple is not None:
            size = -(-size // multiple) * multiple
        if size == table.num_embeddings:
            return table
        pad = embedding.config.pad
        if pad is not None and size <= pad:
            raise ValueError(f"{size} tokens would not hold the padding token, {pad}")
        table.weight = resize_rows(table.weight, size, mean)
        table.num_embeddings = size
        head = getattr(self.model, "head", None)
        if isinstance(head, WordHead) and PREDICTED.intersection(fields):
            if not head.tied:
                head.register_parameter("weight", resize_rows(head.weight, size, mean))
            if head.bias is not None:
                head.bias = resize_rows(head.bias, size, mean)
        for module in self.model.modules():
            if isinstance(module, TokenEmbedding) and module.table is table:
                module.vocab = size
        changed = dict.fromkeys(fields, size)
        self.model.config = self.model.config.model_copy(update=changed)
        self.config.subquad = {**self.config.subquad, **changed}
        return table


def resize_rows(weight: Tensor, rows: int, mean: bool) -> nn.Parameter:
    """Returns a parameter with the first rows of `weight`; further rows are their mean, or drawn as in new models."""
    content = weight.detach()[:rows]
    if (added := rows - len(content)) > 0:
        new: Any = weight.detach().float().mean(0, keepdim=True).expand(added, *weight.shape[1:])
        if not mean:
            new = torch.zeros_like(new) if weight.ndim == 1 else torch.randn_like(new) * weight.shape[1] ** -0.5
        content = torch.cat([content, new.to(weight.dtype)])
    return nn.Parameter(content.clone(), requires_grad=weight.requires_grad)
