"""Fixtures of fairseq's checkpoints: files as it saves them, what they hold, and what it generates with them."""

import json
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from subquad.data.tokenizers.fairseq import post_process
from subquad.decode.options import DecodeOptions
from subquad.decode.translate import Candidate, Translator
from subquad.interop.checkpoints import import_checkpoint
from subquad.interop.checkpoints.safe_pickle import read_pickle
from subquad.models import Seq2Seq
from subquad.train.checkpoint import average, load_weights_of
from subquad.train.run import LoadedRun, load_trained
from tests.originals.beams import SCORE_TOLERANCE
from tests.originals.token_bleu import token_bleu

NAMED = re.compile(r"(main|legacy)_(?P<kind>[a-z]+)_glu")
AVERAGED = re.compile(r".*_avg(\d+)")
INPUTS = re.compile(r"dict\.\w+\.txt|test\.(src|tgt)")
"""Files that the checks of the others read."""
ROUNDING = 5e-5
"""Of the four decimals that fairseq prints."""


def check(path: Path) -> None:
    if path.suffix == ".pt":
        check_checkpoint(path)
    elif path.name == "generation.json":
        kinds = [name for name, value in json.loads(path.read_text()).items() if isinstance(value, dict)]
        assert any(path.with_name(f"main_{kind}_glu.pt").exists() for kind in kinds), "no checkpoint generates this"
    elif path.name == "checkpoint_contents.json":
        check_contents(path)
    elif path.name.startswith("fairseq_generate_"):
        check_printed(path)
    else:
        assert INPUTS.fullmatch(path.name), f"no check understands {path}"


@contextmanager
def imported(path: Path) -> Iterator[LoadedRun]:
    """The run that a checkpoint becomes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        import_checkpoint(path, run)
        yield load_trained(run)


def translations(loaded: LoadedRun, lines: list[str], **options: Any) -> list[list[Candidate]]:
    """The n-best of every line."""
    assert isinstance(loaded.model, Seq2Seq)
    sides = loaded.tokenizer("source"), loaded.tokenizer("target")
    translator = Translator([loaded.model], *sides, DecodeOptions(**options))
    return [found.candidates for found in translator.translate(lines)]


# ---------------------------------------------------------------------- checkpoints


def check_checkpoint(path: Path) -> None:
    """Every checkpoint becomes a run; what is stored about it must come out of this run."""
    contents = read_pickle(path)
    with imported(path) as loaded:
        assert loaded.update == contents["optimizer_history"][-1]["num_updates"]
        if found := AVERAGED.fullmatch(path.stem):
            check_average(path, int(found[1]), loaded)
        elif found := NAMED.fullmatch(path.stem):
            check_generation(path.with_name("generation.json"), found["kind"], loaded)


def check_average(path: Path, count: int, loaded: LoadedRun) -> None:
    """The mean of the newest checkpoints, imported one by one, is fairseq's mean, imported."""
    numbers = {int(one.stem.removeprefix("checkpoint")): one for one in path.parent.glob("checkpoint[0-9]*.pt")}
    newest = [numbers[number] for number in sorted(numbers, reverse=True)[:count]]
    assert len(newest) == count, f"{path} is a mean of {count} checkpoints; {len(newest)} are there"
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for one in newest:
            import_checkpoint(one, run := Path(folder) / one.stem)
            runs.append(load_trained(run).checkpoint)
        ours = average(runs)
    golden = load_weights_of(loaded.checkpoint)
    assert ours.keys() == golden.keys()
    for name, value in golden.items():
        assert torch.equal(ours[name], value), name


def check_generation(path: Path, kind: str, loaded: LoadedRun) -> None:
    """n-best lists of the test's lines: tokens, scores, words."""
    stored = json.loads(path.read_text())
    lines = path.with_name("test.src").read_text().splitlines()
    options = {"beam": stored["beam"], "nbest": stored["beam"]}
    options |= {"lenpen": stored["lenpen"], "max_len_b": stored["max_len_b"]}
    golden = stored[kind]["hypos"]
    for ours, theirs in zip(translations(loaded, lines, **options), golden, strict=True):
        assert [one.tokens for one in ours] == [one["tokens"] for one in theirs]
        assert [post_process(one.text, "subword_nmt") for one in ours] == [one["text"] for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert abs(one.score - other["score"]) < SCORE_TOLERANCE


def check_contents(path: Path) -> None:
    """What the files of torch.save hold, read by the restricted reader."""
    checked = 0
    for name, expected in json.loads(path.read_text()).items():
        file = path.with_name(name.removesuffix(" keys"))
        if not file.exists():
            continue
        contents, checked = read_pickle(file), checked + 1
        if name.endswith(" keys"):
            assert {key: list(value.shape) for key, value in contents["model"].items()} == expected
        else:
            assert {key: described(value, expected[key]) for key, value in contents.items()} == expected
    assert checked, f"{path} describes no file beside it"


def described(value: Any, as_in: Any) -> Any:
    """A value by its keys, its length or its type, as the file describes it."""
    if isinstance(as_in, list):
        return list(value)
    return len(value) if isinstance(as_in, int) else type(value).__name__


# ---------------------------------------------------------------------- what fairseq-generate printed


class Printed(NamedTuple):
    """A sentence's lines: source, reference, score (base 2) and words of the best, log-probabilities (base 2)."""

    source: str
    reference: str
    score: float
    words: str
    log_probabilities: list[float]


def printed_sentences(text: str) -> dict[int, Printed]:
    lines = {
        (found[1], int(found[2])): found[3] for found in re.finditer(r"^([STHP])-(\d+)\t(.*)$", text, re.MULTILINE)
    }
    sentences = {}
    for number in sorted({number for _, number in lines}):
        score, _, words = lines["H", number].partition("\t")
        each = [float(value) for value in lines["P", number].split()]
        sentences[number] = Printed(lines["S", number], lines["T", number], float(score), words, each)
    return sentences


def check_printed(path: Path) -> None:
    """Sentences that fairseq lost in batches of eight are not in its output: all are translated, these compared."""
    text = path.read_text()
    kind = path.name.removeprefix("fairseq_generate_").partition("_")[0]
    beam = re.search(r"with beam=(\d+): BLEU4 = ([\d.]+), ([\d./]+) \(.* syslen=(\d+), reflen=(\d+)\)", text)
    assert beam is not None
    golden = printed_sentences(text)
    lines = path.with_name("test.src").read_text().splitlines()
    with imported(path.with_name(f"main_{kind}_glu.pt")) as loaded:
        ours = translations(loaded, lines, beam=int(beam[1]))
    assert len(ours) == len(lines) >= len(golden) > 0
    words = []
    for number, sentence in golden.items():
        (best,) = ours[number]
        assert lines[number] == sentence.source
        words.append(post_process(best.text, "subword_nmt"))
        assert words[-1] == sentence.words
        assert abs(best.score / math.log(2) - sentence.score) < SCORE_TOLERANCE
        for one, other in zip(best.log_probabilities, sentence.log_probabilities, strict=True):
            assert abs(one / math.log(2) - other) < SCORE_TOLERANCE + ROUNDING
    check_score(words, [sentence.reference for sentence in golden.values()], beam)


def check_score(hypotheses: list[str], references: list[str], golden: re.Match[str]) -> None:
    """The last line: BLEU of the words and its parts."""
    first = 4  # below are the special symbols
    numbers: dict[str, int] = {}
    for word in " ".join([*hypotheses, *references]).split():
        numbers.setdefault(word, first + len(numbers))
    sides = [[[numbers[word] for word in line.split()] for line in side] for side in (hypotheses, references)]
    measure = token_bleu(*sides, pad=1, eos=2, unk=3)
    said, asked, *counts = measure.statistics.sum(0).tolist()
    precisions = [f"{100 * right / total:.1f}" for right, total in zip(counts[:4], counts[4:], strict=True)]
    assert f"{measure.value:.2f}" == golden[2]
    assert (precisions, int(said), int(asked)) == (golden[3].split("/"), int(golden[4]), int(golden[5]))
