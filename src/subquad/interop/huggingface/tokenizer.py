"""Our tokenizers in Hugging Face's format.

Pieces of words (BPE, unigram, a tokenizer.json) become transformers' own fast tokenizer. The other kinds are wrapped:
`SubquadTokenizer` asks ours, so that every text has the numbers of training.
"""

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from subquad.data.tokenizers import Tokenizer
from subquad.data.tokenizers.base import ROLES, restore_tokenizer
from subquad.data.tokenizers.subword import SubwordTokenizer

FILE = "subquad_tokenizer.json"
INPUTS = ["input_ids", "attention_mask"]
Side = Literal["before", "after"]
"""Where `eos` stands: a language model reads a text after the end of another, a translator a sentence with its end."""


def converted(tokenizer: Tokenizer, eos: Side, longest: int | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in Hugging Face's format, with `eos` before or after each text.

    longest: most tokens that the model reads, `eos` included; None: any number.
    """
    symbols = {f"{role}_token": tokenizer.id_to_token(number) for role, number in _roles(tokenizer, eos).items()}
    common: dict[str, Any] = {
        **symbols,
        "padding_side": "left" if eos == "before" else "right",
        "model_input_names": INPUTS,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # spelled in a text, they are text
    }
    if not isinstance(tokenizer, SubwordTokenizer):
        common.pop("unk_token", None)  # decoding shows unknown words, and leaves special symbols out
        return SubquadTokenizer(content=_to_json(tokenizer), eos=eos, **common)
    engine = Engine.from_buffer(tokenizer.files()["tokenizer.json"])
    end = symbols["eos_token"]
    engine.post_processor = TemplateProcessing(
        single=f"{end} $A" if eos == "before" else f"$A {end}", special_tokens=[(end, tokenizer.eos)]
    )
    kind = SubquadPieces if eos == "before" else PreTrainedTokenizerFast
    return kind(tokenizer_object=engine, **common)


def _roles(tokenizer: Tokenizer, eos: Side) -> dict[str, int]:
    """Numbers of the special symbols by role. What begins a text of a language model is `eos`."""
    numbers = {role: getattr(tokenizer, role) for role in ROLES}
    if eos == "before":
        numbers["bos"] = tokenizer.eos
    return {role: number for role, number in numbers.items() if number >= 0}


class Continuing(PreTrainedTokenizerBase):
    """Where `eos` stands before texts, tokens without it are the rest of one: decoding keeps the space before it."""

    eos_side: Side = "before"

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, int):
            ids = [ids]
        if ids and not isinstance(ids[0], int):
            return [self.decode(row, skip_special_tokens, **options) for row in ids]
        plain: Any = partial(super().decode, skip_special_tokens=skip_special_tokens, **options)
        first = next((number for number in ids if number != self.pad_token_id), self.eos_token_id)
        if self.eos_side == "after" or first == self.eos_token_id:
            return plain(ids)
        word = next((number for number in range(len(self)) if plain([number]).strip().isalnum()), self.eos_token_id)
        return plain([word, *ids]).removeprefix(plain([word]))


class SubquadPieces(Continuing, PreTrainedTokenizerFast):
    """Pieces of words for language models, which write the rest of a text."""


class SubquadTokenizer(Continuing, PreTrainedTokenizer):
    """One of our tokenizers. Decoding leaves out padding, beginnings and ends, whatever it is asked."""

    vocab_files_names = {"vocab_file": FILE}  # noqa: RUF012 - the base class has it so

    def __init__(
        self, vocab_file: str | None = None, content: dict[str, Any] | None = None, eos: Side = "after", **common: Any
    ) -> None:
        """vocab_file: what `save_vocabulary` wrote, or `content`: the same in memory."""
        if content is None:
            if vocab_file is None:
                raise ValueError("a SubquadTokenizer is loaded with from_pretrained")
            content = json.loads(Path(vocab_file).read_text())
        self.content, self.inner, self.eos_side = content, _from_json(content), eos
        self.symbols: list[str] = []
        self.numbers: dict[str, int] = {}
        for number in range(self.inner.size):
            symbol = self.inner.id_to_token(number)
            symbol = symbol if symbol not in self.numbers else f"{symbol}#{number}"
            self.symbols.append(symbol)
            self.numbers[symbol] = number
        super().__init__(eos=eos, **common)

    @property
    def vocab_size(self) -> int:
        return self.inner.size

    def get_vocab(self) -> dict[str, int]:
        return dict(self.numbers)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.symbols[number] for number in self.inner.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.numbers.get(token, self.inner.unk)

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.inner.decode(self.numbers[token] for token in tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        parts = [part for part in (token_ids_0, token_ids_1) if part is not None]
        end = [self.inner.eos]
        joined = [end + part if self.eos_side == "before" else part + end for part in parts]
        return [number for part in joined for number in part]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / (f"{filename_prefix}-{FILE}" if filename_prefix else FILE)
        path.write_text(json.dumps(self.content, indent=2) + "\n")
        return (str(path),)


def _to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a tokenizer as JSON-compatible data, because the hub fetches one file and not a folder."""
    files = {name: base64.b64encode(content).decode() for name, content in tokenizer.files().items()}
    settings = {"kind": tokenizer.kind, "settings": tokenizer.settings(), "files": files}
    return {**settings, "fingerprint": tokenizer.fingerprint()}


def _from_json(content: dict[str, Any]) -> Tokenizer:
    files = {name: base64.b64decode(text) for name, text in content["files"].items()}
    return restore_tokenizer(content, files, FILE)
