"""How models are asked for text."""

from typing import Literal

from pydantic import Field

from subquad.config import Options


class DecodeOptions(Options):
    """Options of beam search, as fairseq means them, and of the batches that are decoded together.

    The score of a hypothesis is sum_t log p(y_t) / length^lenpen, its end counted in both.
    """

    beam: int = Field(5, ge=1, description="hypotheses that are followed at once; 1: greedy")
    nbest: int = Field(1, ge=1, description="hypotheses to give back, at most `beam`")
    lenpen: float = Field(1.0, description="exponent of the length that a score is divided by; 0: not divided")
    max_len_a: float = Field(0.0, ge=0, description="most target tokens: a * source tokens + b, the end not counted")
    max_len_b: int = Field(200, ge=0, description="see max_len_a")
    min_len: int = Field(1, ge=0, description="fewest target tokens, the end not counted")
    unk_penalty: float = Field(0.0, description="taken off the log-probability of the unknown symbol")
    temperature: float = Field(1.0, gt=0, description="logits are divided by it")
    no_repeat_ngram: int = Field(0, ge=0, description="no sequence of so many tokens appears twice; 0: any may")
    batch_sentences: int = Field(128, ge=1, description="most sentences of a batch")
    batch_tokens: int = Field(
        12_000, ge=2, description="most of sentences * longest source of a batch; a longer line is cut there"
    )
    weights: Literal["float32", "int8"] = Field("float32", description="int8: faster for few sentences, less exact")
    compile: bool = Field(False, description="torch.compile the blocks")

    def check(self) -> None:
        if self.nbest > self.beam:
            raise ValueError(f"nbest is {self.nbest}: a beam of {self.beam} has no more than {self.beam} hypotheses")


class SampleOptions(Options):
    """Options of drawing tokens one by one; they apply in the order in which they stand here."""

    repetition_penalty: float = Field(
        1.0, gt=0, description="logits of tokens that were said are divided by it where positive, else multiplied"
    )
    temperature: float = Field(1.0, ge=0, description="logits are divided by it; 0: always the likeliest token")
    top_k: int = Field(0, ge=0, description="draw from the k likeliest tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens whose sum first reaches p")
    seed: int = Field(1, ge=0, description="of the draws")
