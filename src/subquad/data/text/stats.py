"""What prepared data looks like: counts, lengths, unknown words, frequent symbols. Plain data, for JSON and tables."""

from typing import Any

import numpy as np

from subquad.data.text.prepared import Prepared
from subquad.data.text.store import TokenStore
from subquad.data.tokenizers.base import Tokenizer

QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
BLOCK = 1 << 22


def text_stats(prepared: Prepared, most: int = 10) -> dict[str, Any]:
    """Statistics of every split and side; `most`: how many of the most frequent symbols."""
    tokenizers = {side: prepared.tokenizer(side) for side in prepared.sides}
    splits = {}
    for split in prepared.splits:
        counts = prepared.description["splits"][split]
        splits[split] = {
            "read": counts["read"],
            "samples": counts["samples"],
            "skipped": counts["skipped"],
            "sides": {side: side_stats(prepared.store(split, side), tokenizers[side], most) for side in prepared.sides},
        }
    vocabularies = {side: {"kind": tokenizer.kind, "size": tokenizer.size} for side, tokenizer in tokenizers.items()}
    return {"folder": str(prepared.folder), "task": prepared.task, "vocabularies": vocabularies, "splits": splits}


def side_stats(store: TokenStore, tokenizer: Tokenizer, most: int = 10) -> dict[str, Any]:
    """Statistics of one store. Tokens are read in blocks; memory is that of the vocabulary and the lengths."""
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
        "symbols_used": int(np.count_nonzero(counts)),
        "most_frequent": [
            {"symbol": tokenizer.symbol(int(number)), "number": int(number), "count": int(counts[number])}
            for number in order
            if counts[number]
        ],
    }


def token_counts(store: TokenStore, size: int) -> np.ndarray:
    """(size,) int64: how often each number occurs."""
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, store.total, BLOCK):
        found = np.bincount(store.tokens[start : start + BLOCK], minlength=size)
        if len(found) > size:
            raise ValueError(f"{store.path} holds the number {len(found) - 1}, the vocabulary has {size} symbols")
        counts += found
    return counts


def length_stats(lengths: np.ndarray) -> dict[str, float]:
    """Smallest, mean, quantiles and largest. A quantile is a length that occurs: the smallest that covers its share."""
    if not len(lengths):
        return {}
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    middle = {name: int(value) for name, value in zip(QUANTILES, quantiles, strict=True)}
    return {"min": int(lengths.min()), "mean": float(lengths.mean()), **middle, "max": int(lengths.max())}
