"""Fixtures about text: fairseq's dictionary, and how pieces become words again."""

import re
from typing import Any

from subquad.data.tokenizers import BOS, EOS, PAD, UNK
from subquad.data.tokenizers.fairseq import FairseqDictionary, WordTokenizer, post_process

SPECIAL = 4


def counted(content: dict[str, Any]) -> FairseqDictionary:
    """The dictionary before it was sorted: its symbols in the order of their first occurrence, with their counts."""
    counts = dict(zip(content["finalized_pf8"], content["counts"], strict=True))
    dictionary = FairseqDictionary()
    for symbol in content["raw"][SPECIAL:]:
        dictionary.add(symbol, counts[symbol])
    return dictionary


def check_dictionary(content: dict[str, Any]) -> None:
    assert content["specials"] == {"bos": BOS, "pad": PAD, "eos": EOS, "unk": UNK}
    dictionary = counted(content)
    assert dictionary.symbols == content["raw"]
    dictionary.finalize(padding_factor=8)
    assert dictionary.symbols == content["finalized_pf8"]
    assert dictionary.counts == content["counts"]
    assert dictionary.text() == content["saved_file"]
    read = FairseqDictionary.parse(content["saved_file"].encode(), "saved_file")
    assert (read.symbols, read.counts) == (dictionary.symbols, dictionary.counts)
    for key, symbols in content.items():
        if found := re.fullmatch(r"thr(\d+)_nwords(\d+)", key):
            limited = counted(content)
            limited.finalize(int(found[1]), int(found[2]), padding_factor=1)
            assert limited.symbols == symbols
    tokenizer, line = WordTokenizer(dictionary), content["encode_line"]
    assert [*tokenizer.encode(line["line"]), EOS] == line["ids"]
    assert tokenizer.encode(line["line"])[::-1] == line["ids_noeos_reverse"]
    ids = [dictionary.index(symbol) for symbol in content["string"].split()]
    assert tokenizer.decode([BOS, *ids, EOS]) == content["string"]


def check_post_process(content: list[dict[str, str]]) -> None:
    assert content
    for case in content:
        assert post_process(case["input"], case["symbol"]) == case["output"], case
