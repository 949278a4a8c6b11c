"""`subquad data`: prepare text for training, and say what prepared data looks like."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.help import Command, Group
from subquad.cli.output import print_table
from subquad.progress import Progress

if TYPE_CHECKING:
    from subquad.data.text.prepare import PrepareStatus
    from subquad.data.text.prepared import Prepared

data = typer.Typer(cls=Group, rich_markup_mode=None)
Files = Annotated[list[str] | None, typer.Option(help="A file; give the option again for the second language.")]


@data.callback()
def about() -> None:
    """Prepare text for training, and describe what was prepared.

    Examples:
    subquad data prepare DATA --train train.en --train train.de --valid valid.en --valid valid.de
    subquad data stats DATA
    """


@data.command(cls=Command)
def prepare(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the memory-mapped tokens go.")],
    config: Annotated[Path | None, typer.Option(help="YAML file of all this; options here replace its own.")] = None,
    task: Annotated[str | None, typer.Option(help="translation (default), language-model or classification.")] = None,
    train: Files = None,
    valid: Files = None,
    test: Files = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of a table, by name or by number from 1: en,de or 2,1.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="text, tsv, csv, jsonl or parquet; default: by name.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bpe, unigram, bytes, characters, words, file, sentencepiece, moses-bpe, ids, saved."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Symbols of the vocabulary at most.")] = None,
    tokenizer_path: Annotated[str | None, typer.Option(help="tokenizer.json, SentencePiece model or folder.")] = None,
    codes: Annotated[str | None, typer.Option(help="File of subword-nmt codes, for moses-bpe.")] = None,
    dictionary: Annotated[str | None, typer.Option(help="fairseq's dict.txt, for words and moses-bpe.")] = None,
    separate: Annotated[bool, typer.Option("--separate", help="A vocabulary of its own for each language.")] = False,
    max_length: Annotated[int | None, typer.Option(help="Skip samples with more tokens on a side.")] = None,
    keep_empty: Annotated[bool | None, typer.Option(help="Keep samples with an empty side.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: as many as cores, if worth it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise text files into memory-mapped tokens, once.

    Called again it redoes only what changed: an input, the tokenizer, an option. A recipe uses the result by
    `data: {folder: FOLDER}`.

    Examples:
    subquad data prepare DATA --train train.en.gz --train train.de.gz --valid val.en.gz --valid val.de.gz
    subquad data prepare DATA --train pairs.tsv --columns en,de --tokenizer bpe --vocab-size 8000
    subquad data prepare DATA --task language-model --train train.txt --valid valid.txt --tokenizer words
    """
    from subquad.data.text.prepare import TextDataConfig, prepare_text
    from subquad.files import read_yaml

    given = read_yaml(config, "file of options") if config is not None else {}
    table = _given(columns=_columns(columns), format=format)
    files = _given(train=train or None, valid=valid or None, test=test or None)
    given["splits"] = {**given.get("splits", {}), **{name: {"files": paths, **table} for name, paths in files.items()}}
    chosen = _given(kind=tokenizer, vocab_size=vocab_size, path=tokenizer_path, codes=codes, dictionary=dictionary)
    given["tokenizer"] = {**given.get("tokenizer", {}), **chosen}
    if separate:
        given["target_tokenizer"] = {**given["tokenizer"], **given.get("target_tokenizer", {})}
    given.update(_given(task=task, max_length=max_length, keep_empty=keep_empty))
    if not given["splits"]:
        raise ValueError("nothing to prepare: give files with --train, --valid and --test, or a --config")
    with Progress() as progress:
        prepared = prepare_text(TextDataConfig.parse("data", given), folder, workers, _report_to(progress))
    described = {"folder": str(folder), "changes": dict(prepared.changes), **prepared.description}
    print(json.dumps(described, indent=2)) if as_json else _print_prepared(prepared)


@data.command(cls=Command)
def stats(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A folder that `subquad data prepare` or fairseq-preprocess wrote."),
    ],
    most: Annotated[int, typer.Option(min=0, help="How many of the most frequent symbols.")] = 10,
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their checksums first.")] = False,
    languages: Annotated[str | None, typer.Option(help="Of a fairseq folder with several pairs: de,en.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show counts, lengths, unknown rates and frequent symbols.

    Examples:
    subquad data stats DATA
    subquad data stats DATA --most 20 --verify
    subquad data stats data-bin/iwslt14 --languages de,en --json
    """
    from tempfile import TemporaryDirectory

    from subquad.data.fairseq.folder import FairseqFolder, fairseq_task
    from subquad.data.text.prepare import prepare_text
    from subquad.data.text.prepared import open_prepared
    from subquad.data.text.stats import text_stats
    from subquad.files import wrap_corrupt_data_errors

    with TemporaryDirectory() as scratch, wrap_corrupt_data_errors(f"the data in {folder}"):
        if (task := fairseq_task(folder)) is not None:
            pair = languages.split(",") if languages is not None else None
            found = FairseqFolder.parse("data", {"path": str(folder), "languages": pair})
            prepared = prepare_text(found.text_config(task), scratch)
        else:
            prepared = open_prepared(folder)
        if verify:
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


def _print_prepared(prepared: "Prepared") -> None:
    splits = prepared.description["splits"]
    for name, tokenizer in prepared.description["tokenizers"].items():
        print(f"{name}: {tokenizer['size']:,} symbols{_fewer(tokenizer)} ({prepared.changes[name]})")
    rows, skipped = [], prepared.skipped()
    for name, split in splits.items():
        tokens = [f"{split['tokens'][side]:,}" for side in prepared.sides]
        change = prepared.changes.get(name, "left as it was")
        rows.append([name, f"{split['samples']:,}", *tokens, skipped.get(name, "none"), change])
    headers = ["split", "samples", *(f"{side} tokens" for side in prepared.sides), "skipped", "why written"]
    print_table(headers, rows, numeric=range(1, 2 + len(prepared.sides)))
    for name, change in prepared.changes.items():
        if change.startswith("removed"):
            print(f"{name}: {change}")


def _fewer(tokenizer: dict[str, Any]) -> str:
    """Why a vocabulary is smaller than it was asked to be."""
    options = tokenizer["key"]["options"]
    asked = options.get("vocab_size") if isinstance(options, dict) else None  # labels have no options
    return f" of {asked:,} asked for: the text has no more" if asked and asked > tokenizer["size"] else ""


def _print_stats(described: dict[str, Any]) -> None:
    for side, vocabulary in described["vocabularies"].items():
        print(f"{side}: {vocabulary['size']:,} symbols ({vocabulary['kind']})")
    rows: list[list[str]] = []
    for split, content in described["splits"].items():
        for side, found in content["sides"].items():
            length = found["length"]
            lengths = [f"{length[name]:.1f}" if name == "mean" else f"{length[name]:,}" for name in length]
            counts = [f"{found[name]:,}" for name in ("samples", "tokens")]
            rows.append([split, side, *counts, *lengths, f"{100 * found['unknown_rate']:.2f} %"])
        rows.append([])
    names = ["min", "mean", "median", "p90", "p95", "p99", "max"]
    print_table(["split", "side", "samples", "tokens", *names, "unknown"], rows[:-1], numeric=range(2, 12))
    for split, content in described["splits"].items():
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in content["skipped"].items() if count)
        print(f"\n{split}: {content['read']:,} samples read, skipped: {skipped or 'none'}")
        for side, found in content["sides"].items():
            frequent = ", ".join(f"{item['symbol']} {item['count']:,}" for item in found["most_frequent"])
            if frequent:
                print(f"  most frequent in {side}: {frequent}")
