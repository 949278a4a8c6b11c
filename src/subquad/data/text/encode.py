"""Encodes samples of text as token ids, in several processes, and keeps the order of the samples.

Only a bounded number of chunks is in progress, so memory does not grow with the size of the data.
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

from subquad.data.tokenizers import Tokenizer, load_tokenizer

CHUNK_SAMPLES = 2000
CHUNK_CHARACTERS = 1 << 20
CHUNKS_PER_WORKER = 4
EMPTY, OVER_LONG, UNREADABLE = "empty", "over-long", "unreadable"

Samples = list[tuple[str, ...]]


@dataclass(frozen=True)
class SkipRules:
    """Which samples are skipped.

    A sample with an empty field, or one of white space only, is skipped unless `keep_empty`, and so is one with a field
    of more than `max_length` tokens.
    """

    keep_empty: bool = False
    max_length: int | None = None

    def select(self, lengths: np.ndarray, blank: np.ndarray | bool = False) -> tuple[np.ndarray, Counter[str]]:
        """Returns which samples are kept, (n,) bool, and how many are skipped by reason.

        lengths, blank: (fields, n), the tokens of each field, and whether its text is white space.
        """
        empty = ((lengths == 0) | blank).any(0) & (not self.keep_empty)
        over_long = (lengths > self.max_length).any(0) if self.max_length is not None else np.zeros_like(empty)
        skipped = Counter({EMPTY: int(empty.sum()), OVER_LONG: int((over_long & ~empty).sum())})
        return ~(empty | over_long), skipped


@dataclass
class TokenChunk:
    """Some samples as token ids.

    For each field: the ids of all samples one after the other, the length of each sample, and the number of unknown
    tokens. num_read: samples that were read, also those that were skipped.
    """

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    unknown: list[int]
    num_read: int
    skipped: Counter[str]


@dataclass(frozen=True)
class Encoder:
    """Encodes samples; `tokenizers` has one tokenizer for each field."""

    tokenizers: Sequence[Tokenizer]
    rules: SkipRules

    def __call__(self, first: int, samples: Samples) -> TokenChunk:
        """first: the number of the first sample, counted from 1, for messages."""
        fields = [self._encode_field(tokenizer, first, samples, i) for i, tokenizer in enumerate(self.tokenizers)]
        lengths = np.array([[len(ids) for ids in field] for field in fields], dtype=np.int64)
        blank = np.array([[not text.strip() for text in field] for field in zip(*samples, strict=True)])
        mask, skipped = self.rules.select(lengths, blank)
        kept = np.flatnonzero(mask)
        tokens = []
        for field in fields:
            parts = [np.asarray(field[i], dtype=np.uint32) for i in kept]
            tokens.append(np.concatenate(parts) if parts else np.zeros(0, np.uint32))
        unknown = [
            int(np.count_nonzero(flat == tokenizer.unk)) if tokenizer.unk >= 0 else 0
            for flat, tokenizer in zip(tokens, self.tokenizers, strict=True)
        ]
        return TokenChunk(tokens, list(lengths[:, kept]), unknown, len(samples), skipped)

    def _encode_field(self, tokenizer: Tokenizer, first: int, samples: Samples, field: int) -> list[list[int]]:
        texts = [sample[field] for sample in samples]
        try:
            return tokenizer.encode_batch(texts)
        except ValueError:
            for number, text in enumerate(texts, first):  # one by one, to find the sample that is wrong
                try:
                    tokenizer.encode(text)
                except ValueError as error:
                    raise ValueError(f"sample {number}: {error}") from None
            raise


def encode_samples(
    samples: Iterable[tuple[str, ...]], folders: Sequence[Path], rules: SkipRules, workers: int
) -> Iterator[TokenChunk]:
    """Yields the samples as chunks of token ids. folders: where the tokenizer of each field is saved."""
    chunks = _split_into_chunks(samples)
    if workers <= 1:
        encoder = Encoder([load_tokenizer(folder) for folder in folders], rules)
        for first, chunk in chunks:
            yield encoder(first, chunk)
        return
    # Workers are started anew rather than forked: a fork would copy locks that other threads may hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(list(folders), rules))
    waiting: deque[Future[TokenChunk]] = deque()
    try:
        for first, chunk in chunks:
            waiting.append(pool.submit(_encode_in_worker, first, chunk))
            if len(waiting) >= CHUNKS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a process that tokenises ended early, perhaps for want of memory; try workers=1") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _split_into_chunks(samples: Iterable[tuple[str, ...]]) -> Iterator[tuple[int, Samples]]:
    """Yields chunks with the number of their first sample, counted from 1."""
    chunk: Samples = []
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


def _start_worker(folders: Sequence[Path], rules: SkipRules) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the parent, and the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker uses one thread
    _encoder = Encoder([load_tokenizer(folder) for folder in folders], rules)


def _encode_in_worker(first: int, samples: Samples) -> TokenChunk:
    assert _encoder is not None
    return _encoder(first, samples)
