"""A trained run on a split: translations against references, perplexity of text, or classes of images.

Several processes share the samples by number. Each result travels with its number, so none is counted twice, and one
that is missing is known. Text is read as it was given, not from prepared tokens: what preparing skips (empty and
over-long samples) counts here.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.data.batches import BatchPlan, shard
from subquad.data.text.store import PreparedText, open_prepared
from subquad.data.tokenizers.simple import IdTokenizer
from subquad.decode.limits import longest_source, longest_text
from subquad.decode.translate import Translator
from subquad.evaluate.accuracy import class_ranks, share, tops
from subquad.evaluate.bleu import bleu, chrf, compound_bleu, word_bleu, word_splitter
from subquad.evaluate.measure import Measure
from subquad.evaluate.perplexity import ContextBlocks, TextSize, TokenLines, bits, perplexity
from subquad.evaluate.report import Evaluation
from subquad.models import LanguageModel, MaskedLanguageModel, Seq2Seq
from subquad.tasks.base import Samples, moved
from subquad.tasks.classification import ImageSamples, transform_from
from subquad.tasks.language import block_losses
from subquad.tasks.masked import AROUND, MaskedSamples, hidden_losses
from subquad.tasks.translation import Pairs, pair_losses
from subquad.train.distributed import Workers
from subquad.train.loaded import Loaded
from subquad.train.loop import evaluation_budget
from subquad.train.recipe import read_recipe
from subquad.train.run import RECIPE, check_has_data
from subquad.train.sources import image_split, prepared_text, raw_samples

Report = Callable[[str], None]
STEPS = 10
"""How often a pass over the samples reports its progress."""
PASSES = {"translation": 2}
"""Passes over the samples, where there is more than one."""
IMAGES = 64
"""Images of a batch."""
AS_GIVEN, FROM_TOKENS = "as given", "decoded from prepared tokens, without the samples that preparing skipped"


def evaluate_run(
    loaded: Loaded,
    split: str,
    *,
    context_window: int = 0,
    workers: Workers | None = None,
    report: Report | None = None,
) -> Evaluation:
    """The run's quality on a split, the same for all workers; report: gets a message `STEPS` times a pass.

    context_window: tokens of earlier text that a language model reads before those that count.
    """
    if context_window and loaded.recipe.task != "language-model":
        raise ValueError(f"a context window is for language models; this run's task is {loaded.recipe.task}")
    check_has_data(loaded.recipe, loaded.folder, split)
    shared = _Shared(workers or Workers(), report or (lambda _: None))
    with torch.inference_mode():
        if loaded.recipe.task == "translation":
            return _translation(loaded, split, shared)
        if loaded.recipe.task == "language-model":
            return _language(loaded, split, context_window, shared)
        if loaded.recipe.task == "masked-language-model":
            return _masked(loaded, split, shared)
        return _images(loaded, split, shared)


class _Shared:
    """Work on numbered samples, shared by processes."""

    def __init__(self, workers: Workers, report: Report) -> None:
        self.workers, self.report = workers, report

    def own(self, count: int) -> range:
        """Numbers of the samples that are this process's."""
        return range(self.workers.rank, count, self.workers.world)

    def steps(self, items: Sequence[Any], what: str) -> Iterable[Any]:
        """The items, with a report after each tenth of them."""
        reported = 0
        for done, item in enumerate(items, 1):
            yield item
            if done * STEPS // len(items) > reported:
                reported = done * STEPS // len(items)
                self.report(f"{what}: {done:,} of {len(items):,}")

    def rows(self, samples: Samples, losses: Callable[[dict[str, Tensor]], list[list[float]]], what: str) -> np.ndarray:
        """Numbers (samples, k) of every sample; losses: those of a batch, one row for each."""
        plan = BatchPlan(*samples.sizes, budget=evaluation_budget(samples), shuffle=False)
        found: dict[int, Any] = {}
        for batch in self.steps(shard(plan.epoch(0), self.workers.rank, self.workers.world), what):
            found.update(zip(batch.tolist(), losses(samples.batch(batch)), strict=True))
        everything = self.collected(found)
        count = len(samples.sizes[0])
        assert everything.keys() == set(range(count)), "every sample has one row"
        return np.array([everything[number] for number in range(count)], np.float64)

    def collected(self, found: Mapping[int, Any]) -> dict[int, Any]:
        """The results of all processes by number."""
        everything: dict[int, Any] = {}
        for part in self.workers.everyones(list(found.items())):
            for number, result in part:
                assert number not in everything, f"sample {number} was counted twice"
                everything[number] = result
        return everything


# ---------------------------------------------------------------------- translation


def _translation(loaded: Loaded, split: str, shared: _Shared) -> Evaluation:
    model = loaded.model
    assert isinstance(model, Seq2Seq)
    source, target = loaded.tokenizer("source"), loaded.tokenizer("target")
    pairs, origin = text_of(loaded, split)
    sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    translator = Translator([model], source, target, loaded.recipe.decode)
    own = shared.own(len(pairs))
    results = translator.lines(sources[number] for number in own)
    numbered = zip(shared.steps(own, "lines translated"), results, strict=False)  # what is missing is counted below
    found = {number: result.text for number, result in numbered}
    everything = shared.collected(found)
    hypotheses = [everything.get(number, "") for number in range(len(pairs))]
    counted = shared.workers.sum_numbers({"empty": translator.empty, "shortened": translator.shortened})
    name, words = word_splitter(target)
    tokenised = [words(text) for text in hypotheses], [words(text) for text in references]
    said = f"|words:{name}"
    measures = {
        "bleu": bleu(hypotheses, references),
        "chrf": chrf(hypotheses, references),
        "tokenised_bleu": _signed(word_bleu(*tokenised), said),
        "compound_bleu": _signed(compound_bleu(*tokenised), said),
    }
    ends = {"pad": target.pad, "eos": target.eos}
    inputs = TokenLines(_cut(source.encode_batch(sources), longest_source(model)))
    outputs = TokenLines(_cut(target.encode_batch(references), longest_text(model)))
    losses = shared.rows(
        Pairs(inputs, outputs, **ends),
        lambda batch: pair_losses(model, moved(batch, loaded.device), target.pad),
        "references scored",
    )
    measures["ppl"] = perplexity(losses, signature=f"tokens:target, ends counted|tokenizer:{target.fingerprint()[:12]}")
    counts = {"tokens": int(losses[:, 1].sum()), **{key: int(value) for key, value in counted.items()}}
    settings = {"decode": loaded.recipe.decode.model_dump(mode="json")}
    data = {"sha256": _digest(pairs), "text": origin}
    lost = len(pairs) - len(everything)
    return Evaluation("translation", split, len(pairs), lost, measures, data, settings, counts, hypotheses)


def _signed(measure: Measure, more: str) -> Measure:
    return Measure(measure.statistics, measure.score, measure.signature + more, measure.better)


def _cut(lines: list[list[int]], most: int | None, around: int = 1) -> list[list[int]]:
    """Lines no longer than the model can read with what is around them: their end, and a beginning."""
    return lines if most is None else [line[: most - around] for line in lines]


# ---------------------------------------------------------------------- language modelling


def _language(loaded: Loaded, split: str, context_window: int, shared: _Shared) -> Evaluation:
    model, tokenizer, options = loaded.model, loaded.tokenizer("text"), loaded.recipe.data.blocks
    assert isinstance(model, LanguageModel)
    samples, origin = text_of(loaded, split)
    lines = [line for (line,) in samples]
    store = TokenLines(tokenizer.encode_batch(lines))
    blocks = ContextBlocks(store, options, context_window, tokenizer.pad, tokenizer.eos)
    losses = shared.rows(
        blocks, lambda batch: block_losses(model, moved(batch, loaded.device), tokenizer.pad), "pieces of text scored"
    )
    tokens = int(losses[:, 1].sum())
    lost = blocks.blocks.total - tokens
    how = f"|context:{context_window}|sample:{options.tokens_per_sample}|breaks:{options.breaks}"
    how += f"|tokenizer:{tokenizer.fingerprint()[:12]}"
    measures = {"ppl": perplexity(losses, signature=f"per:token, line ends counted{how}")}
    counts = {"tokens": tokens, "pieces": len(blocks)}
    if not isinstance(tokenizer, IdTokenizer):  # numbers have no words
        size = TextSize.of(lines)
        counts |= {"words": size.words, "bytes": size.bytes}
        word, byte = f"per:whitespace word, line ends counted{how}", f"per:UTF-8 byte, line ends counted{how}"
        measures["word_ppl"] = perplexity(losses, size.words / tokens, word)
        measures["bits_per_byte"] = bits(losses, size.bytes / tokens, byte)
    settings = {"context_window": context_window, **options.model_dump(mode="json")}
    data = {"sha256": _digest(samples), "text": origin}
    return Evaluation("language-model", split, len(lines), lost, measures, data, settings, counts)


def _masked(loaded: Loaded, split: str, shared: _Shared) -> Evaluation:
    model, tokenizer, recipe = loaded.model, loaded.tokenizer("text"), loaded.recipe.data
    assert isinstance(model, MaskedLanguageModel)
    texts, origin = text_of(loaded, split)
    lines = tokenizer.encode_batch([line for (line,) in texts])
    if recipe.blocks.breaks != "none":  # lines stay whole, so what the model cannot read is cut
        lines = _cut(lines, longest_text(model), AROUND)
    store = TokenLines(lines)
    samples = MaskedSamples(store, recipe.blocks, recipe.masking, tokenizer)
    losses = shared.rows(
        samples, lambda batch: hidden_losses(model, moved(batch, loaded.device), tokenizer.pad), "pieces of text scored"
    )
    hidden = recipe.masking
    how = f"hidden:{hidden.share:g}, {hidden.kept:g} kept, {hidden.random:g} random"
    how += f"|sample:{recipe.blocks.tokens_per_sample}|breaks:{recipe.blocks.breaks}"
    measures = {"ppl": perplexity(losses, signature=f"per:hidden token|{how}|tokenizer:{tokenizer.fingerprint()[:12]}")}
    counts = {"hidden tokens": int(losses[:, 1].sum()), "tokens": samples.blocks.total, "pieces": len(losses)}
    settings = {"masking": hidden.model_dump(mode="json"), **recipe.blocks.model_dump(mode="json")}
    data = {"sha256": _digest(texts), "text": origin}
    return Evaluation("masked-language-model", split, len(texts), 0, measures, data, settings, counts)


def text_of(loaded: Loaded, split: str, most: int | None = None) -> tuple[list[tuple[str, ...]], str]:
    """The samples of a split, or the first `most` of them, and where they come from."""
    samples = raw_samples(loaded.recipe, split)
    if samples is not None:
        return samples[:most], AS_GIVEN
    with TemporaryDirectory() as scratch:
        data = _prepared(loaded, Path(scratch))
        sides = []
        for side in data.fields:
            tokenizer, store = data.tokenizer(side), data.store(split, side)
            sides.append([tokenizer.decode(store[number]) for number in range(len(store))[:most]])
    return list(zip(*sides, strict=True)), FROM_TOKENS


def _prepared(loaded: Loaded, scratch: Path) -> PreparedText:
    """The data of which there are only tokens: what training prepared, unless the recipe's was changed since."""
    config, own = loaded.recipe.data, loaded.folder / "data"
    if config.folder is not None:
        return open_prepared(config.folder)
    if own.exists() and config == read_recipe(loaded.folder / RECIPE).data:
        return open_prepared(own)
    return prepared_text(loaded.recipe, scratch)


def _digest(samples: Any) -> str:
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()


# ---------------------------------------------------------------------- images


def _images(loaded: Loaded, split: str, shared: _Shared) -> Evaluation:
    """Images that cannot be read are lost: they have no result."""
    images = image_split(loaded.recipe, split, loaded.inputs["classes"])
    samples = ImageSamples(images, transform_from(loaded.inputs["transform"]))
    own = list(shared.own(len(images)))
    found: dict[int, list[int]] = {}
    parts = [own[start : start + IMAGES] for start in range(0, len(own), IMAGES)]
    for part in shared.steps(parts, "batches of images classified"):
        single = {number: samples.batch(np.array([number])) for number in part}
        readable = [number for number in part if len(single[number]["labels"])]
        if readable:
            batch = {name: torch.cat([single[n][name] for n in readable]) for name in ("images", "labels")}
            batch = moved(batch, loaded.device)
            ranks = class_ranks(loaded.model(batch["images"]).logits, batch["labels"]).tolist()
            labels = batch["labels"].tolist()
            found.update(zip(readable, map(list, zip(labels, ranks, strict=True)), strict=True))
    everything = shared.collected(found)
    if not everything:
        raise ValueError(f"none of the {len(images):,} images of {split} could be read")
    known = np.array([everything[number] for number in sorted(everything)])
    classes = len(images.classes)
    measures = {f"top{most}": share(known[:, 1] < most, f"top-{most}|classes:{classes}") for most in tops(classes)}
    lost = len(images) - len(everything)
    data = {"sha256": _digest([[number, everything[number][0]] for number in sorted(everything)]), "images": AS_GIVEN}
    return Evaluation("image-classification", split, len(images), lost, measures, data)
