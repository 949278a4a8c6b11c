"""`subquad translate`: lines from standard input, their translations on standard output."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.lines import LineReader, warn_of_lines
from subquad.cli.options import (
    Bfloat16,
    Checkpoint,
    Compile,
    Graphs,
    Int8,
    RemoveBpe,
    RunFolders,
    refuse_other_folders,
    weights_option,
)
from subquad.progress import Progress

if TYPE_CHECKING:
    from subquad.decode.translate import Translation


def translate(
    runs: RunFolders,
    beam: Annotated[
        int | None, typer.Option(help="How many hypotheses beam search follows at once. With 1 it is greedy.")
    ] = None,
    nbest: Annotated[int | None, typer.Option(help="How many translations to print for each line.")] = None,
    lenpen: Annotated[
        float | None, typer.Option(help="Scores are divided by the length to this power. Larger values favour length.")
    ] = None,
    max_len_a: Annotated[
        float | None, typer.Option(help="A translation has at most A * source tokens + B tokens; this is A.")
    ] = None,
    max_len_b: Annotated[int | None, typer.Option(help="This is B of the limit that --max-len-a describes.")] = None,
    min_len: Annotated[int | None, typer.Option(help="A translation has at least this many tokens.")] = None,
    unk_penalty: Annotated[
        float | None, typer.Option(help="This is subtracted from the log-probability of the unknown symbol.")
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(help="No sequence of this many tokens appears twice in a translation.")
    ] = None,
    batch_sentences: Annotated[int | None, typer.Option(help="At most this many lines are decoded together.")] = None,
    remove_bpe: RemoveBpe = None,
    scores: Annotated[bool, typer.Option("--scores", help="Print the score before each translation.")] = False,
    alignments: Annotated[
        bool,
        typer.Option("--alignments", help="Print which source token each target token comes from, as SOURCE-TARGET."),
    ] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Read lines SOURCE <tab> PREFIX; each translation begins with its PREFIX.")
    ] = False,
    int8: Int8 = False,
    bfloat16: Bfloat16 = False,
    compile: Compile = False,
    graphs: Graphs = False,
    checkpoint: Checkpoint = "best",
) -> None:
    """Translate standard input line by line.

    Every line gives one line of output (with --nbest, that many), in order and as soon as it is ready. Columns are
    separated by tabs. An option that is not given has the value of the run's recipe.

    Examples:
    subquad translate runs/phrases < input.txt > output.txt
    echo "5 km" | subquad translate runs/phrases --beam 4 --nbest 2 --scores
    subquad translate runs/first runs/second --checkpoint average < input.txt
    """
    refuse_other_folders(runs[0])
    given = {
        "beam": beam,
        "nbest": nbest,
        "lenpen": lenpen,
        "max_len_a": max_len_a,
        "max_len_b": max_len_b,
        "min_len": min_len,
        "unk_penalty": unk_penalty,
        "no_repeat_ngram": no_repeat_ngram,
        "remove_bpe": remove_bpe,
        "batch_sentences": batch_sentences,
        "weights": weights_option(int8, bfloat16),
        "compile": True if compile else None,
        "graphs": True if graphs else None,
    }
    from subquad.api import load_run
    from subquad.decode.translate import WINDOW

    for run in runs[1:]:
        if run.is_file():
            raise ValueError(f"{run} is no run; text comes from standard input: subquad translate {runs[0]} < {run}")
    first, *others = [load_run(run, checkpoint) for run in runs]
    translator = first.translator(*others, alignments=alignments, **given)
    show = _Columns(translator.options.nbest > 1, scores, alignments)
    reader = LineReader(sys.stdin.buffer)
    number, start = 0, time.monotonic()
    with Progress(live=sys.stderr.isatty() and not sys.stdout.isatty()) as progress:
        for window in reader.windows(WINDOW):
            sources, starts = _split(window, number) if prefix else (window, None)
            for translated in translator.translate_window(sources, starts):
                number += 1
                sys.stdout.write(show(number, translated))
                progress.update(f"{number:,} lines, {number / (time.monotonic() - start):,.0f} a second")
            sys.stdout.flush()
    warn_of_lines(reader.replaced, "were not UTF-8: what could not be read was replaced")
    warn_of_lines(translator.empty, "were empty, and so are their translations")
    warn_of_lines(
        translator.truncated, f"were cut at {translator.max_source_tokens:,} tokens, the most that are read of a line"
    )


def _split(window: list[str], before: int) -> tuple[list[str], list[str]]:
    sources, starts = [], []
    for number, line in enumerate(window, before + 1):
        source, tab, start = line.partition("\t")
        if not tab:
            raise ValueError(f"line {number} has no tab: with --prefix, lines are SOURCE <tab> PREFIX")
        sources.append(source)
        starts.append(start)
    return sources, starts


class _Columns:
    """A line's translations as text."""

    def __init__(self, numbers: bool, scores: bool, alignments: bool) -> None:
        self.numbers, self.scores, self.alignments = numbers, scores, alignments

    def __call__(self, number: int, translated: "Translation") -> str:
        lines = []
        for candidate in translated.candidates:
            columns = [str(number)] if self.numbers else []
            columns += [f"{candidate.score:.4f}"] if self.scores else []
            columns.append(" ".join(candidate.text.split("\n")))  # a line is one line, whatever a tokenizer gives
            if self.alignments:
                columns.append(" ".join(f"{source}-{target}" for source, target in candidate.alignment or ()))
            lines.append("\t".join(columns) + "\n")
        return "".join(lines)
