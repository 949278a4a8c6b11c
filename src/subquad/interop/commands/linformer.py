"""crybot/linformer: `./run.sh SCRIPT --config FILE.yaml`, with the config read from its file."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from subquad.files import read_yaml
from subquad.interop.checkpoints.linformer.convert import DECODE
from subquad.interop.commands.conversion import RECIPE, Conversion
from subquad.interop.commands.flags import Arguments, read_arguments
from subquad.interop.commands.shell import Invocation
from subquad.models import PRESETS
from subquad.original_names import Flag

Data = dict[str, Any]
FLAGS = {
    "--config": Flag("the recipe"),
    "--checkpoint": Flag("RUN of `subquad evaluate`"),
    "--out": Flag(reason="the hypotheses are written to evaluation-test.hyp.txt of the run"),
}
SETTINGS = {
    "model": {"type", "dim", "mlp_dim", "n_heads", "n_layers", "k", "vocab_size", "encoder_only"},
    "training": {"epochs", "batch_size", "learning_rate", "lr_scheduler"},
    "dataset": {"max_length"},
}
"""What configs say, and what has a counterpart."""
SCHEDULE = {"warmup_steps", "cosine_annealing", "cosine_tmax", "min_lr"}
WITHOUT_EFFECT: Data = {"cosine_factor": 1.0, "cosine_restart": False}
"""Settings of the schedule that have no counterpart, with the values that change nothing."""
FILES = "datasets/wmt14_translate_de-en"
SPLITS = {"train": "train", "valid": "validation", "test": "test"}
"""The splits here, and in the names of the files."""
TOKENIZER = "models/facebook/bart-base/tokenizer.json"
DUMP = "datasets/wmt14-050-tokenized-256.npz"
"""Where the program has the CSV files, BART's tokenizer and what pretokenize_dataset.py writes."""
PREPARED = "data/wmt14_en_de_tokens"
MAX_LENGTH = 256
"""Of the presets."""
LENGTHS = [2**power for power in range(8, 15)]
TOKENS = 16384
PROJECT = "HLT"
"""The project of Weights & Biases that the program looks into."""


def convert(invocation: Invocation, folder: Path) -> Conversion:
    """Converts a script of the program. folder: where its relative paths begin."""
    script = Path(invocation.words[0]).stem if invocation.words and invocation.words[0].endswith(".py") else ""
    arguments = read_arguments(invocation.words[1:], FLAGS, script or "run.sh")
    if script in ("train_my", "train_mt", "train"):
        return _convert_training(_read_config(arguments, folder), arguments)
    if script == "compare_performance":
        return _convert_measurement(_read_config(arguments, folder), arguments)
    if script == "evaluate":
        return _convert_evaluation(arguments)
    if script == "pretokenize_dataset":
        notes = [
            f"A recipe reads the result with `data: {{folder: {PREPARED}}}`. Nothing has to be tokenised before, "
            "though: `subquad train` does it once, and keeps the tokens in the run."
        ]
        words = ["data", "prepare", PREPARED]
        for split, name in SPLITS.items():
            words += [f"--{split}", f"{FILES}_{name}.csv"]
        words += ["--columns", "en,de", "--tokenizer", "file", "--tokenizer-path", TOKENIZER]
        return Conversion("crybot/linformer", commands=[f"subquad {shlex.join(words)}"], notes=notes)
    known = "train_my.py, compare_performance.py, evaluate.py and pretokenize_dataset.py"
    raise ValueError(
        f"run.sh: {invocation.words[0] if invocation.words else 'no script'}: those that are known are {known}"
    )


def _read_config(arguments: Arguments, folder: Path) -> Data:
    if "config" not in arguments:
        raise ValueError("run.sh: the script needs --config FILE.yaml")
    given = Path(str(arguments.get("config")))
    path = given if given.is_file() else folder / given  # a script names files from where it is started
    content = read_yaml(path, "config of crybot/linformer, which the command names:")
    missing = [name for name in ("model", "training", "dataset") if not isinstance(content.get(name), Mapping)]
    if missing:
        raise ValueError(
            f"{path}: a config of crybot/linformer has sections model, training and dataset; {missing[0]} is missing"
        )
    return dict(content)


def _convert_training(config: Mapping[str, Any], arguments: Arguments) -> Conversion:
    training, schedule = config["training"], config["training"].get("lr_scheduler", {})
    length, epochs = int(config["dataset"]["max_length"]), int(training["epochs"])
    recipe: Data = {
        "task": "translation",
        "data": {
            "splits": {
                split: {"files": [f"{FILES}_{name}.csv"], "columns": ["en", "de"]} for split, name in SPLITS.items()
            },
            "tokenizer": {"kind": "file", "path": TOKENIZER},
            "max_length": length - 1,
        },
        "model": _model(config["model"], length),
        "optim": {"name": "adamw", "betas": [0.9, 0.999]},
        "schedule": {
            "kind": "cosine-epochs" if schedule.get("cosine_annealing") else "constant",
            "lr": float(training["learning_rate"]),
            "warmup_updates": int(schedule.get("warmup_steps", 0)),
            "warmup_init": 1e-7,
        },
        "train": {
            "epochs": epochs,
            "budget": {"max_tokens": None, "max_sentences": int(training["batch_size"])},
            "seed": 42,
            "precision": "float16",
        },
        "decode": DECODE,
    }
    if schedule.get("cosine_annealing"):
        recipe["schedule"] |= {"min_lr": float(schedule["min_lr"]), "epochs": int(schedule.get("cosine_tmax", epochs))}
    origins = {
        "train.epochs": "training.epochs",
        "train.budget.max_sentences": "training.batch_size",
        "schedule.lr": "training.learning_rate",
        "schedule.warmup_updates": "training.lr_scheduler.warmup_steps",
        "schedule.min_lr": "training.lr_scheduler.min_lr",
        "schedule.epochs": "training.lr_scheduler.cosine_tmax",
        "data.max_length": "dataset.max_length, of which one is eos",
        "model.preset": "model",
    }
    notes = [
        "All of the training file is used, in random order; the original takes its first half, unshuffled.",
        "Pairs of more than max_length tokens are left out and counted, where the original cuts them.",
        "The text is read from the CSV files. Where there is only the dump of pretokenize_dataset.py, it is named: "
        f"'data.splits.train={{files: [{DUMP}], columns: [src, tgt]}}'.",
    ]
    run = f"runs/{Path(str(arguments.get('config'))).stem}"
    commands = [f"subquad {shlex.join(['train', RECIPE, '--out', run])}", f"subquad evaluate {run} --split test"]
    unsupported = _settings_without_counterpart(config) | arguments.unsupported
    return Conversion("crybot/linformer", recipe, origins, commands, unsupported, notes)


def _settings_without_counterpart(config: Mapping[str, Any]) -> dict[str, str]:
    given = {section: set(config[section]) - known for section, known in SETTINGS.items()}
    schedule = config["training"].get("lr_scheduler", {})
    given["training.lr_scheduler"] = {
        name
        for name in set(schedule) - SCHEDULE
        if name not in WITHOUT_EFFECT or schedule[name] != WITHOUT_EFFECT[name]
    }
    return {
        f"{section}.{name}": "no setting here is like it" for section, names in given.items() for name in sorted(names)
    }


def _model(model: Mapping[str, Any], length: int) -> Data:
    """The preset of the original's model, with what its config changes."""
    proj_k = int(model["k"]) if str(model.get("type", "")).lower().startswith("linformer") else None
    preset = "vanilla_translation" if proj_k is None else "linformer_translation_k32"
    named = f"linformer_translation_k{proj_k}"
    preset = named if named in PRESETS else preset
    base = PRESETS[preset]
    changes: Data = {} if int(model["dim"]) == base["dim"] else {"dim": int(model["dim"])}
    for side in ("encoder", "decoder"):
        own = {"layers": int(model["n_layers"]), "heads": int(model["n_heads"]), "ffn_dim": int(model["mlp_dim"])}
        changed = {name: value for name, value in own.items() if value != base[side][name]}
        part = "mixer" if side == "encoder" else "cross"
        read = base[side][part] | ({} if proj_k is None else {"proj_k": proj_k, "max_length": length})
        if read != base[side][part]:
            changed[part] = read
        if changed:
            changes[side] = changed
    return {"preset": preset, **changes}


def _convert_measurement(config: Mapping[str, Any], arguments: Arguments) -> Conversion:
    """compare_performance.py: the time of a forward pass by length, of a whole model or of its encoder alone.

    Exact attention is measured at every length, whatever the config says; a Linformer has max_length positions.
    """
    model = config["model"]
    changes = _model(model, MAX_LENGTH)
    name = changes.pop("preset")
    longest = int(config["dataset"]["max_length"]) if "k" in model else max(LENGTHS)
    lengths = ",".join(str(length) for length in LENGTHS if length <= longest)
    part = ["--part", "encoder"] if model.get("encoder_only") else []
    words = ["bench", "--preset", name, *part, "--lengths", lengths, "--tokens", str(TOKENS)]
    words += [word for change in _dotted(changes) for word in ("--set", change)]
    csv = f"{Path(str(arguments.get('config'))).stem}.csv"
    return Conversion("crybot/linformer", commands=[f"subquad {shlex.join([*words, '--out', csv])}"])


def _dotted(changes: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The changes of a model as NAME=VALUE with dotted names."""
    for name, value in changes.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value}"


def _convert_evaluation(arguments: Arguments) -> Conversion:
    """evaluate.py: its checkpoint is a file of a run at Weights & Biases; a run of ours is an artifact there."""
    checkpoint = str(arguments.get("checkpoint", "CHECKPOINT"))
    if ":" in checkpoint:
        return Conversion("crybot/linformer", commands=[f"subquad evaluate wandb:{checkpoint} --split test"])
    name = re.sub(r"[^\w.-]", "", checkpoint.rpartition("/")[2])
    pulled = ["wandb", "pull", checkpoint] if "/" in checkpoint else ["wandb", "pull", "-p", PROJECT, checkpoint]
    read = f"data.splits.test={{files: [{FILES}_test.csv], columns: [en, de]}}"
    commands = [
        shlex.join(pulled),
        f"subquad import checkpoint.pt --out runs/{name} --tokenizer {TOKENIZER}",
        shlex.join(
            ["subquad", "evaluate", f"runs/{name}", "--split", "test", read, f"data.max_length={MAX_LENGTH - 1}"]
        ),
    ]
    notes = [
        "The first line fetches checkpoint.pt and config.yaml of the run. The model reads and writes BART's tokens: "
        "without --tokenizer, its test set is a dump as pretokenize_dataset.py makes it, and BLEU is that of numbers.",
        "A run that was trained here with track.wandb_artifacts is evaluated by the name of its artifact: subquad "
        "evaluate wandb:ENTITY/PROJECT/NAME:VERSION --split test",
    ]
    return Conversion("crybot/linformer", commands=commands, unsupported=arguments.unsupported, notes=notes)
