"""Statistics of prepared text: counts, lengths, unknown tokens and frequent tokens, as data for JSON and tables."""

from typing import Any

import numpy as np

from subquad.data.text.store import PreparedText, TokenStore
from subquad.data.tokenizers import Tokenizer

QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
BLOCK = 1 << 22


def text_stats(prepared: PreparedText, most: int = 10) -> dict[str, Any]:
    """Returns statistics of every split and field. most: how many of the most frequent tokens are listed."""
    tokenizers = {field: prepared.tokenizer(field) for field in prepared.fields}
    splits = {}
    for split in prepared.splits:
        counts = prepared.description["splits"][split]
        splits[split] = {
            "read": counts["read"],
            "samples": counts["samples"],
            "skipped": counts["skipped"],
            "fields": {
                field: store_stats(prepared.store(split, field), tokenizer, most)
                for field, tokenizer in tokenizers.items()
            },
        }
    vocabularies = {name: {"kind": tokenizer.kind, "size": tokenizer.size} for name, tokenizer in tokenizers.items()}
    facts = {"folder": str(prepared.folder), "sample_kind": prepared.sample_kind}
    return facts | {"vocabularies": vocabularies, "splits": splits}


def store_stats(store: TokenStore, tokenizer: Tokenizer, most: int = 10) -> dict[str, Any]:
    """Returns statistics of one store. Tokens are read in blocks, so memory holds the counts and the lengths only."""
    counts = token_counts(store, tokenizer.size)
    unknown = int(counts[tokenizer.unk]) if tokenizer.unk >= 0 else 0
    order = np.argsort(-counts, kind="stable")[:most]
    return {
        "samples": len(store),
        "tokens": store.total,
        "length": length_stats(store.lengths),
        "empty": int(np.count_nonzero(store.lengths == 0)),
        "unknown": unknown,
        "unknown_rate": unknown / store.total if store.total else 0.0,
        "tokens_used": int(np.count_nonzero(counts)),
        "most_frequent": [
            {"token": tokenizer.id_to_token(int(number)), "id": int(number), "count": int(counts[number])}
            for number in order
            if counts[number]
        ],
    }


def token_counts(store: TokenStore, size: int) -> np.ndarray:
    """Returns (size,) int64: how often each id occurs."""
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, store.total, BLOCK):
        found = np.bincount(store.tokens[start : start + BLOCK], minlength=size)
        if len(found) > size:
            raise ValueError(f"{store.path} holds the token id {len(found) - 1}, but the vocabulary has {size} tokens")
        counts += found
    return counts


def length_stats(lengths: np.ndarray) -> dict[str, float]:
    """Returns smallest, mean, quantiles and largest length. A quantile is the smallest length that covers its share."""
    if not len(lengths):
        return {}
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    middle = {name: int(value) for name, value in zip(QUANTILES, quantiles, strict=True)}
    return {"min": int(lengths.min()), "mean": float(lengths.mean()), **middle, "max": int(lengths.max())}
