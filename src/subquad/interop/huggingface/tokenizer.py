"""Our tokenizers in the format of Hugging Face.

Subword tokenizers (BPE, unigram, a tokenizer.json) become fast tokenizers of transformers. The other kinds are wrapped:
`SubquadTokenizer` calls ours, so every text has the same ids as in training.
"""

import base64
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from subquad.data.tokenizers import ROLES, Tokenizer, restore_tokenizer
from subquad.data.tokenizers.subword import SubwordTokenizer
from subquad.interop.remote_code import STUB, InstalledClass, write_stub
from subquad.tasks.masked_language_model import beginning

FILE = "subquad_tokenizer.json"
INPUTS = ["input_ids", "attention_mask"]
MASK = "<mask>"
Side = Literal["before", "after", "around"]
"""Where `eos` is: a language model reads it before a text, and a translator after a sentence. A masked language model
reads it after a text that begins with `bos`."""


def convert_tokenizer(tokenizer: Tokenizer, eos: Side, longest: int | None = None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer in the format of Hugging Face, with `eos` before or after each text, or as masked language
    models read it, with a mask as one more token.

    longest: the most tokens that the model can read, including `eos`. None: there is no limit.
    """
    symbols = {f"{role}_token": tokenizer.id_to_token(number) for role, number in _special_ids(tokenizer, eos).items()}
    if eos == "around":
        symbols["mask_token"] = _unused(MASK, tokenizer)
    common: dict[str, Any] = {
        **symbols,
        "padding_side": "left" if eos == "before" else "right",
        "model_input_names": INPUTS,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": eos != "around",  # special tokens that a text spells are text, unless it spells a mask
    }
    if not isinstance(tokenizer, SubwordTokenizer):
        common.pop("unk_token", None)  # decoding shows unknown words, but leaves special tokens out
        named = {"AutoTokenizer": [f"{STUB}.{SubquadTokenizer.__name__}", None]}
        return SubquadTokenizer(content=_to_json(tokenizer), eos=eos, auto_map=named, **common)
    engine = Engine.from_buffer(tokenizer.files()["tokenizer.json"])
    first, end = tokenizer.id_to_token(beginning(tokenizer)), symbols["eos_token"]
    engine.post_processor = TemplateProcessing(
        single={"before": f"{end} $A", "after": f"$A {end}", "around": f"{first} $A {end}"}[eos],
        special_tokens=[(end, tokenizer.eos), (first, beginning(tokenizer))],
    )
    if eos != "before":
        return PreTrainedTokenizerFast(tokenizer_object=engine, **common)
    named = {"AutoTokenizer": [None, f"{STUB}.{SubquadPieces.__name__}"]}
    return SubquadPieces(tokenizer_object=engine, auto_map=named, **common)


def _unused(symbol: str, tokenizer: Tokenizer) -> str:
    """Returns a symbol that is no token yet, so that it gets the number after all of them."""
    known = {tokenizer.id_to_token(number) for number in range(tokenizer.size)}
    while symbol in known:
        symbol = f"<{symbol}>"
    return symbol


def _special_ids(tokenizer: Tokenizer, eos: Side) -> dict[str, int]:
    """Returns the ids of the special tokens by role. A text of a language model begins with `eos`."""
    numbers = {role: getattr(tokenizer, role) for role in ROLES}
    if eos == "before":
        numbers["bos"] = tokenizer.eos
    return {role: number for role, number in numbers.items() if number >= 0}


class ContinuationTokenizer(InstalledClass, PreTrainedTokenizerBase):
    """If `eos` is before texts, tokens without it continue a text, and decoding keeps the space before them."""

    eos_side: Side = "before"

    def save_pretrained(self, save_directory: Any, *inputs: Any, **options: Any) -> Any:
        """Saves the tokenizer as the base class does, with what lets transformers find our classes."""
        saved = super().save_pretrained(save_directory, *inputs, **options)
        return (*saved, str(write_stub(save_directory)))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, int):
            ids = [ids]
        if ids and not isinstance(ids[0], int):
            return [self.decode(row, skip_special_tokens, **options) for row in ids]
        plain: Any = partial(super().decode, skip_special_tokens=skip_special_tokens, **options)
        first = next((number for number in ids if number != self.pad_token_id), self.eos_token_id)
        if self.eos_side != "before" or first == self.eos_token_id:
            return plain(ids)
        word = next((number for number in range(len(self)) if plain([number]).strip().isalnum()), self.eos_token_id)
        return plain([word, *ids]).removeprefix(plain([word]))


class SubquadPieces(ContinuationTokenizer, PreTrainedTokenizerFast):
    """A subword tokenizer for language models, which continue a text."""


class SubquadTokenizer(ContinuationTokenizer, PreTrainedTokenizer):
    """Wraps one of our tokenizers. Decoding always leaves out `bos`, `pad` and `eos`."""

    vocab_files_names = {"vocab_file": FILE}  # noqa: RUF012 - as in the base class

    def __init__(
        self, vocab_file: str | None = None, content: dict[str, Any] | None = None, eos: Side = "after", **common: Any
    ) -> None:
        """vocab_file: a file that `save_vocabulary` wrote. content: the content of such a file."""
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
        return {**self.numbers, **self.added_tokens_encoder}  # of which the mask is no word

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.symbols[number] for number in self.inner.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.numbers.get(token, self.inner.unk)

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = []
        for own, group in itertools.groupby(tokens, self.numbers.__contains__):  # others were added, such as a mask
            found = list(group)
            parts += [self.inner.decode(self.numbers[token] for token in found)] if own else found
        return " ".join(parts)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        parts = [part for part in (token_ids_0, token_ids_1) if part is not None]
        first, end = [beginning(self.inner)], [self.inner.eos]
        before, after = {"before": (end, []), "after": ([], end), "around": (first, end)}[self.eos_side]
        joined = [before + part + after for part in parts]
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
