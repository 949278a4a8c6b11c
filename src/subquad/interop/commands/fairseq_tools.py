"""Programs of fairseq that train nothing: generate, interactive, validate, eval-lm, preprocess, average_checkpoints."""

import shlex
from collections.abc import Set
from pathlib import PurePosixPath
from typing import Any

from subquad.interop.commands.conversion import Conversion
from subquad.interop.commands.fairseq_train import checkpoint_place, import_command, run_folder
from subquad.interop.commands.flags import Arguments, read_arguments
from subquad.interop.commands.shell import Invocation
from subquad.original_names import AVERAGING, GENERATION, PREPARATION, Flag, key

SUBWORD_NMT = "subword_nmt"
"""What --remove-bpe means without a value, or with one of JOINERS."""
JOINERS = ("@@ ", "@@")
PADDING_FACTOR = 8
"""fairseq-preprocess fills dictionaries up to a multiple of this."""
IMPORT_NOTE = "A checkpoint that fairseq wrote becomes a run first, and is its `--checkpoint last`: {}"
DECODING = {
    name: flag.fields.removeprefix("decode.") for name, flag in GENERATION.items() if flag.fields.startswith("decode.")
}

TRANSLATING = {
    "beam": "--beam",
    "nbest": "--nbest",
    "lenpen": "--lenpen",
    "max_len_a": "--max-len-a",
    "max_len_b": "--max-len-b",
    "min_len": "--min-len",
    "unkpen": "--unk-penalty",
    "no_repeat_ngram_size": "--no-repeat-ngram",
    "batch_size": "--batch-sentences",
    "max_sentences": "--batch-sentences",
    "remove_bpe": "--remove-bpe",
    "post_process": "--remove-bpe",
}
"""The options of `subquad translate`."""
IMPORTED = {"path", "bpe_codes"}
"""What names the run, and what the command has that imports it."""
BATCHES = "evaluation makes its own batches, which change no result"
LANGUAGES = "the run knows its languages"
ELSEWHERE = {
    "source_lang": LANGUAGES,
    "target_lang": LANGUAGES,
    "batch_size": BATCHES,
    "max_sentences": BATCHES,
    "max_tokens": BATCHES,
    "bpe": "the run knows its codes: --codes of `subquad import`",
    "tokenizer": "the run knows it: --moses of `subquad import`",
    "sampling": "`subquad generate` samples, from language models",
    "print_alignment": "`subquad translate --alignments` shows them",
    "input": "the split is evaluated; `subquad translate` reads lines",
}
"""Why flags of some of the programs are no options of others."""


def convert_generation(invocation: Invocation) -> Conversion:
    """Converts fairseq-generate and fairseq-validate."""
    program = invocation.name
    arguments = read_arguments(invocation.words, GENERATION | {"--remove-bpe": _remove_bpe(invocation)}, program)
    (run, *others), checkpoint, notes = _models(arguments)
    decoding = DECODING if program == "fairseq-generate" else {}
    changes = [
        f"decode.{option}={_joiner(given) if option == 'remove_bpe' else given}"
        for name, option in decoding.items()
        if (given := arguments.get(key(name))) is not None
    ]
    subset, usual = ("gen_subset", "test") if program == "fairseq-generate" else ("valid_subset", "valid")
    words = ["evaluate", run, "--checkpoint", checkpoint, "--split", str(arguments.get(subset, usual)), *changes]
    unsupported = _unsupported(arguments, {subset, *map(key, decoding)}, "evaluate")
    if others:
        unsupported[str(arguments.words("path"))] = (
            f"`subquad evaluate` takes one run; several translate together: subquad translate {run} {' '.join(others)}"
        )
    return Conversion(program, commands=[f"subquad {shlex.join(words)}"], unsupported=unsupported, notes=notes)


def convert_interaction(invocation: Invocation) -> Conversion:
    """Converts fairseq-interactive."""
    program = invocation.name
    arguments = read_arguments(invocation.words, GENERATION | {"--remove-bpe": _remove_bpe(invocation)}, program)
    runs, checkpoint, notes = _models(arguments)
    words = ["translate", *runs, "--checkpoint", checkpoint]
    for name, option in TRANSLATING.items():
        if (given := arguments.get(name)) is not None:
            words += [option, _joiner(given) if option == "--remove-bpe" else str(given)]
    words += ["--alignments"] if "print_alignment" in arguments else []
    shown = f"subquad {shlex.join(words)} < {arguments.get('input', 'INPUT')}"
    unsupported = _unsupported(arguments, {*TRANSLATING, "print_alignment", "input"}, "translate")
    return Conversion(program, commands=[shown], unsupported=unsupported, notes=notes)


def convert_language_evaluation(invocation: Invocation) -> Conversion:
    """Converts fairseq-eval-lm."""
    arguments = read_arguments(invocation.words, GENERATION, "fairseq-eval-lm")
    (run, *others), checkpoint, notes = _models(arguments)
    words = ["evaluate", run, "--checkpoint", checkpoint, "--split", str(arguments.get("gen_subset", "test"))]
    words += ["--context-window", str(arguments.get("context_window", 0))]
    if "tokens_per_sample" in arguments:
        words.append(f"data.blocks.tokens_per_sample={arguments.get('tokens_per_sample')}")
    unsupported = _unsupported(arguments, {"gen_subset", "context_window", "tokens_per_sample"}, "evaluate")
    if others:
        unsupported[str(arguments.words("path"))] = "`subquad evaluate` takes one run"
    command = f"subquad {shlex.join(words)}"
    return Conversion("fairseq-eval-lm", commands=[command], unsupported=unsupported, notes=notes)


def convert_averaging(invocation: Invocation) -> Conversion:
    """Converts scripts/average_checkpoints.py."""
    arguments = read_arguments(invocation.words, AVERAGING, "average_checkpoints.py")
    inputs = [str(arguments.get("inputs", "")), *arguments.positional]
    words = ["average", run_folder(inputs[0])]
    for flag, option in (("num_epoch_checkpoints", "--epochs"), ("num_update_checkpoints", "--updates")):
        if flag in arguments:
            words += [option, str(arguments.get(flag))]
    if "checkpoint_upper_bound" in arguments:
        words += ["--up-to", str(arguments.get("checkpoint_upper_bound"))]
    if len(inputs) > 1 or inputs[0].endswith(".pt"):
        folder = str(PurePosixPath(inputs[0]).parent)
        words = ["average", run_folder(folder), *(PurePosixPath(path).stem for path in inputs)]
    notes = ["The average is the checkpoint `average` of the run; --name gives it another name."]
    unsupported = dict(arguments.unsupported)
    return Conversion(
        "average_checkpoints.py", commands=[f"subquad {shlex.join(words)}"], unsupported=unsupported, notes=notes
    )


def convert_preparation(invocation: Invocation) -> Conversion:
    """Converts fairseq-preprocess: text needs no step before training, and a folder that exists is read as it is."""
    arguments = read_arguments(invocation.words, PREPARATION, "fairseq-preprocess")
    languages = [str(arguments.get(name)) for name in ("source_lang", "target_lang") if name in arguments]
    folder = str(arguments.get("destdir", "data-bin"))
    prepared = f"data/{PurePosixPath(folder.rstrip('/')).name}"
    words = ["data", "prepare", prepared, *(["--samples", "text"] if "only_source" in arguments else [])]
    splits = {}
    for split in ("train", "valid", "test"):
        if f"{split}pref" in arguments:
            prefix = str(arguments.get(f"{split}pref"))
            files = [prefix] if "only_source" in arguments else [f"{prefix}.{language}" for language in languages]
            words += [word for file in files for word in (f"--{split}", file)]
            splits[split] = files
    words += ["--tokenizer", "words"]
    for flag, option in (("srcdict", "--dictionary"), ("nwordssrc", "--vocab-size"), ("thresholdsrc", "--min-count")):
        if arguments.get(flag, "0") != "0":
            words += [option, str(arguments.get(flag))]
    if "srcdict" not in arguments:
        words += ["--multiple", str(arguments.get("padding_factor", PADDING_FACTOR))]
    if not {"joined_dictionary", "only_source"} & set(arguments.values):
        words.append("--separate")
    notes = [
        f"A recipe reads the result with `data: {{folder: {prepared}}}`. Nothing has to be prepared, though: `subquad "
        f"train` does it, and a folder of fairseq's that exists is read as it is: 'data:={{fairseq: {folder}}}'."
    ]
    notes += [
        f"{arguments.words(target)}: options of this command are for both languages; target_tokenizer in a file for "
        "--config is for one."
        for source, target in (("srcdict", "tgtdict"), ("nwordssrc", "nwordstgt"), ("thresholdsrc", "thresholdtgt"))
        if target in arguments and arguments.get(target) != arguments.get(source, "0")
    ]
    command, unsupported = f"subquad {shlex.join(words)}", dict(arguments.unsupported)
    found = Conversion("fairseq-preprocess", commands=[command], unsupported=unsupported, notes=notes)
    found.text = (folder, {"splits": splits, **_tokenizers(arguments)})
    for split in splits:
        found.origins[f"data.splits.{split}"] = str(arguments.words(f"{split}pref"))
    return found


def _tokenizers(arguments: Arguments) -> dict[str, Any]:
    """The section `data` of a text whose pieces become a dictionary for both languages, or for each its own."""

    def of_side(side: str) -> dict[str, Any]:
        if (dictionary := arguments.get(f"{side}dict")) is not None:
            return {"kind": "words", "dictionary": str(dictionary)}
        limits = {
            "vocab_size": int(arguments.get(f"nwords{side}", 0)),
            "min_count": int(arguments.get(f"threshold{side}", 0)),
        }
        limits["multiple"] = int(arguments.get("padding_factor", PADDING_FACTOR))
        return {"kind": "words", **{name: value for name, value in limits.items() if value > 0}}

    if {"joined_dictionary", "only_source"} & set(arguments.values):
        return {"tokenizer": of_side("src")}
    return {"tokenizer": of_side("src"), "target_tokenizer": of_side("tgt")}


def checkpoint_words(path: str, arguments: Arguments) -> tuple[str, str, str]:
    """The run of a checkpoint, its name there, and the command that imports one of the original's."""
    return *checkpoint_place(path), import_command(path, arguments)


def _models(arguments: Arguments) -> tuple[list[str], str, list[str]]:
    """The runs of --path, which may be several with colons between them, the checkpoint to take, and what to say."""
    paths = str(arguments.get("path", "checkpoints/checkpoint_best.pt")).split(":")
    places = [checkpoint_words(path, arguments) for path in paths]
    runs = list(dict.fromkeys(run for run, _, _ in places))
    notes = [IMPORT_NOTE.format(imported) for _, _, imported in places]
    if len(runs) < len(paths):
        notes.append("Checkpoints of one folder are imported to runs of different names, to be used together.")
    return runs, places[0][1], notes


def _joiner(given: Any) -> str:
    return SUBWORD_NMT if given in (True, *JOINERS) else str(given)


def _unsupported(arguments: Arguments, used: Set[str], command: str) -> dict[str, str]:
    """The flags that leave no trace in the command, and why."""
    found = dict(arguments.unsupported)
    for name, given in arguments.values.items():
        if name not in {*used, *IMPORTED} and given.words not in found:
            found[given.words] = ELSEWHERE.get(name, f"`subquad {command}` has nothing like it")
    return found


def _remove_bpe(invocation: Invocation) -> Flag:
    """--remove-bpe stands with or without a value."""
    flag = GENERATION["--remove-bpe"]
    words = list(invocation.words)
    place = words.index("--remove-bpe") if "--remove-bpe" in words else None
    alone = place is not None and (place + 1 == len(words) or words[place + 1].startswith("-"))
    return flag._replace(switch=alone)
