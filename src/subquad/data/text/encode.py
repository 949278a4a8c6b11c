"""Samples of text into samples of tokens, in several processes, in the order in which they came.

Reading never runs far ahead of writing: a bounded number of chunks is under way, so memory does not grow with the data.
"""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from subquad.data.tokenizers import load_tokenizer
from subquad.data.tokenizers.base import Tokenizer

CHUNK_SAMPLES = 2000
CHUNK_CHARACTERS = 1 << 20
CHUNKS_PER_WORKER = 4
EMPTY, OVER_LONG = "empty", "over-long"

Chunk = list[tuple[str, ...]]


@dataclass(frozen=True)
class Rules:
    """Which samples are skipped: those with an empty side, unless `keep_empty`, and those with a side of more than
    `max_length` tokens."""

    keep_empty: bool = False
    max_length: int | None = None


def chosen(lengths: np.ndarray, rules: Rules) -> tuple[np.ndarray, Counter[str]]:
    """Which samples stay, (n,) bool, and how many are skipped for which reason; `lengths` is (sides, n)."""
    empty = (lengths == 0).any(0) & (not rules.keep_empty)
    over_long = (lengths > rules.max_length).any(0) if rules.max_length is not None else np.zeros_like(empty)
    return ~(empty | over_long), Counter({EMPTY: int(empty.sum()), OVER_LONG: int((over_long & ~empty).sum())})


@dataclass
class Encoded:
    """A chunk. For each side its tokens one after the other, the length of each sample, and how many are unknown."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    unknown: list[int]
    read: int
    skipped: Counter[str]


@dataclass(frozen=True)
class Encoder:
    """Turns a chunk of samples into tokens; `tokenizers` has one for each side."""

    tokenizers: Sequence[Tokenizer]
    rules: Rules

    def __call__(self, first: int, chunk: Chunk) -> Encoded:
        """first: number of the chunk's first sample, from 1, for messages."""
        sides = [self._side(tokenizer, first, chunk, i) for i, tokenizer in enumerate(self.tokenizers)]
        lengths = np.array([[len(ids) for ids in side] for side in sides], dtype=np.int64)
        mask, skipped = chosen(lengths, self.rules)
        kept = np.flatnonzero(mask)
        tokens = []
        for side in sides:
            parts = [np.asarray(side[i], dtype=np.uint32) for i in kept]
            tokens.append(np.concatenate(parts) if parts else np.zeros(0, np.uint32))
        unknown = [
            int(np.count_nonzero(flat == tokenizer.unk)) if tokenizer.unk >= 0 else 0
            for flat, tokenizer in zip(tokens, self.tokenizers, strict=True)
        ]
        return Encoded(tokens, list(lengths[:, kept]), unknown, len(chunk), skipped)

    def _side(self, tokenizer: Tokenizer, first: int, chunk: Chunk, side: int) -> list[list[int]]:
        texts = [sample[side] for sample in chunk]
        try:
            return tokenizer.encode_batch(texts)
        except ValueError:
            for number, text in enumerate(texts, first):  # once more, to say which sample it is
                try:
                    tokenizer.encode(text)
                except ValueError as error:
                    raise ValueError(f"sample {number}: {error}") from None
            raise


def encoded_chunks(
    samples: Iterable[tuple[str, ...]], folders: Sequence[Path], rules: Rules, workers: int
) -> Iterator[Encoded]:
    """Chunks of samples as tokens. folders: the saved tokenizer of each side."""
    chunks = _chunks(samples)
    if workers <= 1:
        encoder = Encoder([load_tokenizer(folder) for folder in folders], rules)
        for first, chunk in chunks:
            yield encoder(first, chunk)
        return
    # A new process for each worker: a fork would copy locks that other threads may hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_set_up, initargs=(list(folders), rules))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for first, chunk in chunks:
            waiting.append(pool.submit(_encode, first, chunk))
            if len(waiting) >= CHUNKS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a process that tokenises ended early, perhaps for want of memory; try workers=1") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(samples: Iterable[tuple[str, ...]]) -> Iterator[tuple[int, Chunk]]:
    """Chunks with the number of their first sample, from 1."""
    chunk: Chunk = []
    first, characters = 1, 0
    for sample in samples:
        chunk.append(sample)
        characters += sum(map(len, sample))
        if len(chunk) >= CHUNK_SAMPLES or characters >= CHUNK_CHARACTERS:
            yield first, chunk
            first, characters, chunk = first + len(chunk), 0, []
    if chunk:
        yield first, chunk


_encoder: Encoder | None = None


def _set_up(folders: Sequence[Path], rules: Rules) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the threads
    _encoder = Encoder([load_tokenizer(folder) for folder in folders], rules)


def _encode(first: int, chunk: Chunk) -> Encoded:
    assert _encoder is not None
    return _encoder(first, chunk)
