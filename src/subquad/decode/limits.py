"""The maximal lengths of source and target, which tables of positions and some mechanisms limit."""

from typing import cast

from torch import nn

from subquad.mixers import Mixer
from subquad.models import LanguageModel, MaskedLanguageModel, Seq2Seq, TextClassifier
from subquad.nn.block import Block
from subquad.nn.embeddings import TokenEmbedding


def max_source_length(model: Seq2Seq) -> int | None:
    """Returns the maximal number of source tokens including eos, or None without a limit."""
    crosses = [cast(Block, block).cross for block in model.decoder.blocks]
    return _smallest_limit(model.source, model.encoder, *filter(None, crosses))


def max_text_length(model: Seq2Seq | LanguageModel | MaskedLanguageModel | TextClassifier) -> int | None:
    """Returns the maximal number of tokens that the decoder, or else the encoder, reads; None without a limit."""
    embedding = model.target if isinstance(model, Seq2Seq) else model.embedding
    stack = model.decoder if isinstance(model, Seq2Seq | LanguageModel) else model.encoder
    return _smallest_limit(embedding, *(cast(Block, block).mixer for block in stack.blocks))


def _smallest_limit(embedding: TokenEmbedding, *parts: nn.Module) -> int | None:
    limits = [embedding.config.max_length] if embedding.config.positions == "learned" else []
    mixers = [module for part in parts for module in part.modules() if isinstance(module, Mixer)]
    limits += [most for mixer in mixers if (most := getattr(mixer.config, "max_length", None)) is not None]
    return min(limits, default=None)
