"""The options of decoding."""

from typing import Literal

from pydantic import Field

from subquad.config import Options


class DecodeOptions(Options):
    """Options of beam search, with the meaning that fairseq gives them, and of batches.

    The score of a hypothesis is sum_t log p(y_t) / length^lenpen; both include eos.
    """

    beam: int = Field(5, ge=1, description="The number of hypotheses that are continued at a time; 1: greedy.")
    nbest: int = Field(1, ge=1, description="The number of hypotheses to return, at most `beam`.")
    lenpen: float = Field(1.0, description="Scores are divided by length^lenpen; 0: they are not divided.")
    max_len_a: float = Field(
        0.0, ge=0, description="The maximal number of target tokens is a * source tokens + b, without eos."
    )
    max_len_b: int = Field(200, ge=0, description="The constant b in the limit that max_len_a describes.")
    min_len: int = Field(1, ge=0, description="The minimal number of target tokens, without eos.")
    unk_penalty: float = Field(0.0, description="It is subtracted from the log-probability of the unknown token.")
    temperature: float = Field(1.0, gt=0, description="Logits are divided by it.")
    no_repeat_ngram: int = Field(
        0, ge=0, description="No n-gram of this many tokens is repeated; 0: there is no such limit."
    )
    remove_bpe: Literal["subword_nmt", "@@ ", "sentencepiece", "wordpiece", "letter", "_EOW"] | None = Field(
        None,
        description="How pieces that the tokenizer leaves as they are become words: subword_nmt joins after @@, "
        "sentencepiece at ▁, wordpiece at _, letter at |. Evaluation joins references as well.",
    )
    batch_sentences: int = Field(128, ge=1, description="The maximal number of sentences in a batch.")
    batch_tokens: int = Field(
        12_000,
        ge=2,
        description="The maximal number of source tokens in a batch, with padding. Longer lines are truncated.",
    )
    weights: Literal["float32", "bfloat16", "int8"] = Field(
        "float32",
        description="The precision of the weights. int8 is faster for few sentences and less exact; bfloat16 is for "
        "GPUs.",
    )
    compile: bool = Field(False, description="Whether torch.compile compiles the blocks.")
    graphs: bool = Field(
        False, description="Whether a GPU replays steps as CUDA graphs, which spares Python their launches."
    )

    def check(self) -> None:
        if self.nbest > self.beam:
            raise ValueError(f"nbest is {self.nbest}, but a beam of {self.beam} has only {self.beam} hypotheses")


class SampleOptions(Options):
    """Options of sampling tokens one by one. They apply in this order."""

    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Logits of tokens that occur in the text are divided by it if positive, and else multiplied.",
    )
    temperature: float = Field(1.0, ge=0, description="Logits are divided by it; 0: the most probable token is taken.")
    top_k: int = Field(0, ge=0, description="Samples from the k most probable tokens; 0: from all.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Samples from the most probable tokens whose probabilities first sum to p or more."
    )
    seed: int = Field(1, ge=0, description="The seed of the random generator.")
