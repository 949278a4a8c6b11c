"""`subquad data`: prepare text for training, and say what prepared data looks like."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.options import AsJson
from subquad.cli.output import Command, Group, print_table
from subquad.processes import printable
from subquad.progress import Progress

if TYPE_CHECKING:
    from subquad.data.text.prepare import PrepareStatus
    from subquad.data.text.store import PreparedText

data = typer.Typer(cls=Group, rich_markup_mode=None)
FILES = "A file of the {} data. Give the option again for the second language."
TrainFiles = Annotated[list[str] | None, typer.Option(help=FILES.format("training"))]
ValidFiles = Annotated[list[str] | None, typer.Option(help=FILES.format("validation"))]
TestFiles = Annotated[list[str] | None, typer.Option(help=FILES.format("test"))]


@data.callback()
def about() -> None:
    """Divide, prepare and describe text for training.

    Examples:
    subquad data split novel.txt --out data/own
    subquad data prepare DATA --train train.en --train train.de --valid valid.en --valid valid.de
    subquad data stats DATA
    """


@data.command(cls=Command)
def prepare(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write the tokens to.")],
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file with these settings. Options here replace those of the file."),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="What a sample is: pairs (of languages, the default), text, or labelled (label and text)."),
    ] = None,
    train: TrainFiles = None,
    valid: ValidFiles = None,
    test: TestFiles = None,
    columns: Annotated[
        str | None,
        typer.Option(help="The columns of a table to read, by name (en,de) or by number from 1 (2,1)."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="The format: text, tsv, csv, jsonl or parquet. By default the name tells it."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The kind of tokenizer, such as bpe, words or bytes; a wrong one is answered with the list."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="The vocabulary has at most this many symbols.")] = None,
    min_count: Annotated[
        int | None, typer.Option(min=1, help="Words and characters that occur less often are unknown.")
    ] = None,
    multiple: Annotated[
        int | None,
        typer.Option(min=1, help="Fill a vocabulary of words up to a multiple of this number; fairseq takes 8."),
    ] = None,
    tokenizer_path: Annotated[
        str | None, typer.Option(help="An existing tokenizer: a tokenizer.json, a SentencePiece model or a folder.")
    ] = None,
    codes: Annotated[str | None, typer.Option(help="The file with the codes of subword-nmt, for moses-bpe.")] = None,
    dictionary: Annotated[
        str | None, typer.Option(help="A dict.txt of fairseq, for the tokenizers words and moses-bpe.")
    ] = None,
    separate: Annotated[bool, typer.Option("--separate", help="Give each language a vocabulary of its own.")] = False,
    max_length: Annotated[
        int | None, typer.Option(help="Skip samples with more tokens than this in one of their fields.")
    ] = None,
    keep_empty: Annotated[
        bool | None, typer.Option(help="Whether samples with an empty field, or one of white space, are kept.")
    ] = None,
    on_error: Annotated[
        str | None,
        typer.Option(help="What a line that cannot be read does: stop, or skip, which counts and names the first."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="How many processes work at once. By default one for each core, if it pays.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn text files into memory-mapped tokens, once.

    When it is called again, only what depends on a changed input, tokenizer or option is done anew. A recipe uses the
    result with `data: {folder: FOLDER}`.

    Examples:
    subquad data prepare DATA --train train.en.gz --train train.de.gz --valid val.en.gz --valid val.de.gz
    subquad data prepare DATA --train pairs.tsv --columns en,de --tokenizer bpe --vocab-size 8000
    subquad data prepare DATA --samples text --train train.txt --valid valid.txt --tokenizer words
    subquad data prepare DATA --samples labelled --train reviews/train --valid reviews/valid --tokenizer bytes
    """
    from subquad.data.text.prepare import TextDataConfig, prepare_text
    from subquad.files import read_yaml

    given = read_yaml(config, "file of options") if config is not None else {}
    table = _given(columns=_columns(columns), format=format)
    files = _given(train=train or None, valid=valid or None, test=test or None)
    given["splits"] = {**given.get("splits", {}), **{name: {"files": paths, **table} for name, paths in files.items()}}
    chosen = _given(kind=tokenizer, vocab_size=vocab_size, path=tokenizer_path, codes=codes, dictionary=dictionary)
    chosen |= _given(min_count=min_count, multiple=multiple)
    given["tokenizer"] = {**given.get("tokenizer", {}), **chosen}
    if separate:
        given["target_tokenizer"] = {**given["tokenizer"], **given.get("target_tokenizer", {})}
    given.update(_given(sample_kind=samples, max_length=max_length, keep_empty=keep_empty, on_error=on_error))
    if not given["splits"]:
        raise ValueError("nothing to prepare: give files with --train, --valid and --test, or a --config")
    with Progress() as progress:
        prepared = prepare_text(TextDataConfig.parse("data", given), folder, workers, _report_to(progress))
    described = {"folder": str(folder), "changes": dict(prepared.changes), **prepared.description}
    print(json.dumps(described, indent=2)) if as_json else _print_prepared(prepared)


@data.command(cls=Command)
def split(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text, or a table: TSV, CSV or JSONL; also .gz.")],
    out: Annotated[Path, typer.Option(help="The folder to write train, valid and test to.")],
    held_out: Annotated[
        float, typer.Option(help="The share of the lines that is for validation, and as much for testing.")
    ] = 0.05,
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Draw the lines at random, as suits a table whose rows have no order."),
    ] = False,
    header: Annotated[bool, typer.Option("--header", help="The first line is a header, which all files get.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The seed of --shuffle.")] = 0,
) -> None:
    """Divide one file into training, validation and test data.

    A text is cut in its order, and its end is held out: lines of one passage in two splits would tell a model what it
    is tested on.

    Examples:
    subquad data split novel.txt --out data/own
    subquad data split reviews.csv --out data/reviews --shuffle --header --held-out 0.1
    """
    from subquad.data.text.split import split_file

    counts = split_file(file, out, held_out, shuffle=shuffle, header=header, seed=seed)
    print_table(["split", "lines"], [[name, f"{count:,}"] for name, count in counts.items()], numeric=[1])


@data.command(cls=Command)
def stats(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A folder that `subquad data prepare` or fairseq-preprocess wrote."),
    ],
    most: Annotated[int, typer.Option(min=0, help="How many of the most frequent symbols to show.")] = 10,
    languages: Annotated[
        str | None, typer.Option(help="The language pair to show, if a folder of fairseq has several, as in de,en.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much text there is, and its lengths and symbols.

    All files are read and their checksums are compared first, so that damaged data is an error.

    Examples:
    subquad data stats DATA
    subquad data stats DATA --most 20
    subquad data stats data-bin/iwslt14 --languages de,en --json
    """
    from tempfile import TemporaryDirectory

    from subquad.data.fairseq.folder import FairseqFolder, fairseq_sample_kind
    from subquad.data.text.prepare import prepare_text
    from subquad.data.text.stats import text_stats
    from subquad.data.text.store import open_prepared
    from subquad.files import wrap_corrupt_data_errors

    with TemporaryDirectory() as scratch, wrap_corrupt_data_errors(f"the data in {folder}"):
        if (kind := fairseq_sample_kind(folder)) is not None:
            pair = languages.split(",") if languages is not None else None
            found = FairseqFolder.parse("data", {"path": str(folder), "languages": pair})
            prepared = prepare_text(found.text_config(kind), scratch)
        else:
            prepared = open_prepared(folder)
        prepared.verify()
        described = text_stats(prepared, most) | {"folder": str(folder)}
    print(json.dumps(described, indent=2)) if as_json else _print_stats(described)


def _report_to(progress: Progress) -> Callable[["PrepareStatus"], None]:
    stages: list[str] = []

    def report(status: "PrepareStatus") -> None:
        if status.stage not in stages:
            stages.append(status.stage)
            progress.restart(status.bytes_total or None)
        progress.update(status.message, status.bytes_read if status.bytes_total else None)

    return report


def _given(**options: Any) -> dict[str, Any]:
    """Options that stand on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def _columns(text: str | None) -> list[int | str] | None:
    if text is None:
        return None
    return [int(part) if part.strip().isdecimal() else part.strip() for part in text.split(",")]


def _print_prepared(prepared: "PreparedText") -> None:
    splits = prepared.description["splits"]
    for name, tokenizer in prepared.description["tokenizers"].items():
        print(f"{name}: {tokenizer['size']:,} symbols{_fewer(tokenizer)} ({prepared.changes[name]})")
    rows, skipped = [], prepared.skipped()
    for name, split in splits.items():
        tokens = [f"{split['tokens'][field]:,}" for field in prepared.fields]
        change = prepared.changes.get(name, "left as it was")
        rows.append([name, f"{split['samples']:,}", *tokens, skipped.get(name, "none"), change])
    headers = ["split", "samples", *(f"{field} tokens" for field in prepared.fields), "skipped", "why written"]
    print_table(headers, rows, numeric=range(1, 2 + len(prepared.fields)))
    for name, notes in prepared.reading_notes().items():
        for note in notes:
            print(printable(f"{name}: {note}"))
    for name, change in prepared.changes.items():
        if change.startswith("removed"):
            print(f"{name}: {change}")


def _fewer(tokenizer: dict[str, Any]) -> str:
    """Why a vocabulary is smaller than it was asked to be."""
    options = tokenizer["key"]["options"]
    asked = options.get("vocab_size") if isinstance(options, dict) else None  # labels have no options
    return f" of {asked:,} asked for: the text has no more" if asked and asked > tokenizer["size"] else ""


def _print_stats(described: dict[str, Any]) -> None:
    for field, vocabulary in described["vocabularies"].items():
        print(f"{field}: {vocabulary['size']:,} symbols ({vocabulary['kind']})")
    rows: list[list[str]] = []
    for split, content in described["splits"].items():
        for field, found in content["fields"].items():
            length = found["length"]
            lengths = [f"{length[name]:.1f}" if name == "mean" else f"{length[name]:,}" for name in length]
            counts = [f"{found[name]:,}" for name in ("samples", "tokens")]
            rows.append([split, field, *counts, *lengths, f"{100 * found['unknown_rate']:.2f} %"])
        rows.append([])
    names = ["min", "mean", "median", "p90", "p95", "p99", "max"]
    print_table(["split", "field", "samples", "tokens", *names, "unknown"], rows[:-1], numeric=range(2, 12))
    for split, content in described["splits"].items():
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in content["skipped"].items() if count)
        print(f"\n{split}: {content['read']:,} samples read, skipped: {skipped or 'none'}")
        for field, found in content["fields"].items():
            frequent = ", ".join(f"{printable(item['token'])} {item['count']:,}" for item in found["most_frequent"])
            if frequent:
                print(f"  most frequent in {field}: {frequent}")
