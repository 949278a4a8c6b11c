"""A tokenizer.json of somebody else's: read, or refused by one line."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers, trainers

from subquad.data.tokenizers import SPECIAL_TOKENS, Tokenizer, TokenizerConfig, build_tokenizer
from tests.fuzzing import edited, fuzzed


def plain() -> dict[str, Any]:
    engine = Engine(models.BPE(unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    engine.train_from_iterator(["the cat sat on the mat"], trainer)
    return json.loads(engine.to_str())


def load(folder: Path, content: Any) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return build_tokenizer(TokenizerConfig.parse("tokenizer", {"kind": "file", "path": str(path)}), [])


def test_a_regular_expression_that_takes_forever_is_given_up(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load(tmp_path, plain() | {"pre_tokenizer": pattern})
    assert tokenizer.encode("cat")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ValueError, match="cannot read this text"):
            encode("a" * 40 + "b")


def test_replacements_do_not_multiply(tmp_path: Path) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    with pytest.raises(ValueError, match=r"1,000,000,000 times as long"):
        load(tmp_path, plain() | {"normalizer": {"type": "Sequence", "normalizers": [step] * 3}})
    usual = {"type": "Replace", "pattern": {"String": " "}, "content": "\N{LOWER ONE EIGHTH BLOCK}"}
    load(tmp_path, plain() | {"normalizer": {"type": "Sequence", "normalizers": [usual] * 30}})


@pytest.mark.parametrize("content", ["[" * 100_000, "", "{}", "null", '{"model": 1}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        load(tmp_path, content)


@fuzzed(60)
@given(data=st.data())
def test_edited_tokenizers(tmp_path: Path, data: st.DataObject) -> None:
    content = data.draw(edited(copy.deepcopy(PLAIN)))
    try:
        tokenizer = load(tmp_path, content)
        tokenizer.decode(tokenizer.encode("the cat sat on a dog"))
    except ValueError:
        pass


PLAIN = plain()
