"""fairseq-train as a recipe: the options under fairseq's own names, converted as those in a checkpoint are."""

import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from subquad.interop.checkpoints.fairseq.settings import recipe_sections
from subquad.interop.commands.conversion import RECIPE, Conversion
from subquad.interop.commands.fairseq_model import ModelFlags, has_field
from subquad.interop.commands.flags import Arguments, read_arguments
from subquad.interop.commands.shell import Invocation
from subquad.original_names import MODEL, TRAINING, key
from subquad.train.optim import OptimConfig

TASKS = {
    "translation": "translation",
    "language_modeling": "language-model",
    "masked_lm": "masked-language-model",
}
WARMUPS = {"inverse_sqrt": 4000}
"""The default of --warmup-updates, where it is not 0."""
MAX_POSITIONS = 1024
KEPT_EPOCHS = 10
"""fairseq keeps the checkpoints of all epochs; ten is what its papers average."""
NAMED = {"--arch", "--task", "--save-dir", "--restore-file", "--finetune-from-model"}
"""Flags that the commands show, and those that every training has."""
SMOOTHED = "label_smoothed_cross_entropy"
Data = dict[str, Any]


def convert_training(invocation: Invocation, defaults: Mapping[str, Any] | None = None) -> Conversion:
    """Converts fairseq-train. defaults: flags that a script gives before those of the command, by name."""
    known = TRAINING | MODEL
    words = [word for name, value in (defaults or {}).items() for word in _flag_words(name, value)]
    arguments = read_arguments([*words, *invocation.words], known, "fairseq-train")
    return convert_arguments(arguments, invocation)


def convert_arguments(arguments: Arguments, invocation: Invocation) -> Conversion:
    """Converts the arguments of a training."""
    task = _task(arguments)
    model = ModelFlags(str(arguments.get("arch", "")), arguments)
    settings = _settings(arguments, task, _num_processes(arguments, invocation))
    sections = recipe_sections(settings, update=0)
    recipe: Data = {"task": TASKS[task], "data": _data(arguments, task, sections.recipe.pop("data", {}))}
    # the section decode belongs to the commands that generate
    recipe |= {"model": model.section(), **{name: sections.recipe[name] for name in ("optim", "schedule", "train")}}
    _add_training_options(recipe, arguments)
    origins = _origins(recipe, arguments) | model.origins
    if (processes := _num_processes(arguments, invocation)) > 1:
        origins["train.accumulate"] = f"{origins.get('train.accumulate', '')} on {processes} processes".strip()
    conversion = Conversion("fairseq-train", recipe, origins)
    conversion.unsupported = arguments.unsupported | model.without_effect()
    conversion.notes = [_sentence(note) for note in sections.notes]
    conversion.notes += _training_notes(recipe, arguments, invocation)
    if fulfilled := model.without_lines(recipe["model"]):
        conversion.notes.append(f"The architecture has this already, and no line shows it: {', '.join(fulfilled)}.")
    conversion.start = _start(arguments)
    if conversion.start is not None:
        conversion.notes.append(_import_note(arguments))
    conversion.commands = _training_commands(arguments, invocation, conversion)
    _list_rest(arguments, conversion)
    return conversion


def _list_rest(arguments: Arguments, conversion: Conversion) -> None:
    """Lists the flags that left no trace in the conversion."""
    traces = " ".join([*conversion.origins.values(), *conversion.notes, *conversion.unsupported])
    for name, flag in TRAINING.items():
        words = arguments.words(key(name))
        if words is None or words in traces or name in NAMED:
            continue
        if name.startswith("--reset-"):
            if conversion.start is None:
                conversion.unsupported[words] = "it is for a training that begins with another one's checkpoint"
        else:
            conversion.unsupported[words] = f"{flag.fields} is already so, or plays no part in this training"


def _task(arguments: Arguments) -> str:
    task = str(arguments.get("task", "translation"))
    if task not in TASKS:
        raise ValueError(
            f"fairseq-train: the task {task} has no counterpart here; those that have are {', '.join(TASKS)}"
        )
    if "arch" not in arguments:
        raise ValueError("fairseq-train: the command names no --arch, which decides the model")
    return task


def _num_processes(arguments: Arguments, invocation: Invocation) -> int:
    if "distributed_world_size" in arguments:
        return int(arguments.get("distributed_world_size"))
    return invocation.processes if invocation.processes > 1 else invocation.gpus or 1


def _settings(arguments: Arguments, task: str, processes: int) -> Data:
    """The options of the training under fairseq's names, with its defaults where the command is silent."""
    values = {name: given.value for name, given in arguments.values.items()}
    scheduler = values.get("lr_scheduler", "fixed")
    smoothing = values.get("label_smoothing", 0.0) if values.get("criterion") == SMOOTHED else 0.0
    warmup = WARMUPS.get(str(scheduler), 0)
    defaults = {"task": task, "optimizer": "adam", "lr": 0.25, "warmup_updates": warmup, "seed": 1}
    limits = {"max_sentences": values.get("batch_size") or values.get("max_sentences")}
    numbers: Data = {
        name: _integer(values, name) for name in ("max_tokens", "required_batch_size_multiple") if name in values
    }
    more = {"label_smoothing": smoothing, "distributed_world_size": processes, "lr_scheduler": scheduler}
    lists = {name: values[name].split(",")[0] for name in ("lr", "update_freq") if isinstance(values.get(name), str)}
    limits = {name: int(value) for name, value in limits.items() if value is not None}
    return {**defaults, **values, **numbers, **lists, **more, **limits, "batch_size": None}


def _integer(values: Mapping[str, Any], name: str) -> int:
    try:
        return int(values[name])
    except ValueError:
        raise ValueError(
            f"fairseq-train: --{name.replace('_', '-')} {values[name]}: a whole number is needed"
        ) from None


def _data(arguments: Arguments, task: str, given: Mapping[str, Any]) -> Data:
    folder = arguments.positional[0] if arguments.positional else "data-bin/DATA"
    if task != "translation":
        return {"fairseq": folder, **given}
    languages = [arguments.get("source_lang"), arguments.get("target_lang")]
    pair = {"path": folder, "languages": languages} if all(languages) else folder
    limits = [int(arguments.get(name, MAX_POSITIONS)) for name in ("max_source_positions", "max_target_positions")]
    return {"fairseq": pair, "max_length": min(limits)}


def _add_training_options(recipe: Data, arguments: Arguments) -> None:
    """Adds what the settings of a checkpoint do not tell, and takes out what is the default here."""
    train = recipe["train"]
    if "updates" in train and int(arguments.get("max_epoch", 0)) > 0:  # whichever comes first ends it
        train["epochs"] = int(arguments.get("max_epoch"))
    if "bf16" in arguments:
        train["precision"] = "bfloat16"
    elif any(name in arguments for name in ("fp16", "amp", "memory_efficient_fp16")):
        train["precision"] = "float16"
    for flag, name in (("patience", "patience"), ("log_interval", "log_every"), ("num_workers", "data_workers")):
        if int(arguments.get(flag, -1)) > 0:
            train[name] = int(arguments.get(flag))
    every = int(arguments.get("validate_interval_updates", 0)) or int(arguments.get("save_interval_updates", 0))
    if every > 0:
        train["validate_every"] = every
    if "checkpoint_activations" in arguments:
        train["checkpoint_activations"] = True
    budget = train.get("budget", {})
    if budget.get("max_sentences") is None:
        budget.pop("max_sentences", None)
    if budget.get("multiple") == 8:
        budget.pop("multiple")
    kept = {
        "keep_epochs": int(arguments.get("keep_last_epochs", KEPT_EPOCHS)),
        "keep_last": int(arguments.get("keep_interval_updates", 0)),
        "keep_best": int(arguments.get("keep_best_checkpoints", 0)),
    }
    recipe["checkpoints"] = {name: value for name, value in kept.items() if value > 0}
    track = {
        "tensorboard": True if "tensorboard_logdir" in arguments else None,
        "wandb": arguments.get("wandb_project"),
    }
    if any(track.values()):
        recipe["track"] = {name: value for name, value in track.items() if value}
    unused = {name for name in ("betas", "eps", "momentum") if name in recipe["optim"]} - _optimizer_options(recipe)
    recipe["optim"] = {name: value for name, value in recipe["optim"].items() if name not in unused}


def _optimizer_options(recipe: Data) -> set[str]:
    name = recipe["optim"]["name"]
    return {"momentum"} if name in ("nag", "sgd") else {"betas", "eps"} if name in ("adam", "adamw", "radam") else set()


def _origins(recipe: Data, arguments: Arguments) -> dict[str, str]:
    """The words that set fields of the recipe."""
    found: dict[str, str] = {}
    for name, flag in TRAINING.items():
        words = arguments.words(key(name))
        if words and flag.fields and has_field(recipe, flag.fields):
            found[flag.fields] = f"{found[flag.fields]} {words}" if flag.fields in found else words
    if arguments.positional:
        found["data.fairseq"] = arguments.positional[0]
    if found.get("optim.name") and recipe["optim"]["name"] == OptimConfig().name != arguments.get("optimizer"):
        found["optim.name"] += " has no counterpart"
    return found


def _training_notes(recipe: Data, arguments: Arguments, invocation: Invocation) -> list[str]:
    notes = []
    if "optimizer" not in arguments:
        notes.append("fairseq-train needs --optimizer, and the command has none: Adam is a guess.")
    if not {"updates", "epochs"} & set(recipe["train"]):
        recipe["train"]["epochs"] = 100
        notes.append("The command has no end (--max-update, --max-epoch): train.epochs is a guess.")
    if invocation.processes == 1 and invocation.gpus is None and "distributed_world_size" not in arguments:
        notes.append(
            "fairseq takes all GPUs that it sees, and CUDA_VISIBLE_DEVICES is not set: train.accumulate counts one; "
            "multiply it by their number."
        )
    if "keep_last_epochs" not in arguments:
        notes.append(f"fairseq keeps the checkpoints of all epochs; this recipe keeps the last {KEPT_EPOCHS}.")
    if "criterion" in arguments and arguments.get("criterion") not in (
        SMOOTHED,
        "cross_entropy",
        "adaptive_loss",
        "masked_lm",
    ):
        notes.append(f"The criterion {arguments.get('criterion')} has no counterpart: the loss is the cross-entropy.")
    return notes


def _start(arguments: Arguments) -> tuple[Path, str, str] | None:
    """The options --from-run, --reset and --checkpoint; None: the training begins with random weights, or goes on."""
    path = arguments.get("finetune_from_model") or arguments.get("restore_file")
    if path is None or ("finetune_from_model" not in arguments and "/" not in str(path)):
        return None  # a name alone is a checkpoint of the training's own folder, which the same command goes on with
    run, checkpoint = checkpoint_place(str(path))
    checkpoint = "last" if checkpoint.isdigit() else checkpoint  # once it is imported, it is the only one of its run
    # fairseq counts updates in the optimiser's state, so that these two begin anew together, and the schedule not alone
    anew = "reset_optimizer" in arguments or "finetune_from_model" in arguments
    return Path(run), "optimizer,schedule" if anew else "", checkpoint


def _import_note(arguments: Arguments) -> str:
    path = str(arguments.get("finetune_from_model") or arguments.get("restore_file"))
    return (
        f"The training begins with the weights of {path}. If fairseq wrote it, it becomes a run first: "
        f"{import_command(path, arguments)}."
    )


def _training_commands(arguments: Arguments, invocation: Invocation, conversion: Conversion) -> list[str]:
    words = ["train", RECIPE]
    if conversion.start is not None:
        run, reset, checkpoint = conversion.start
        words += ["--from-run", str(run), "--checkpoint", checkpoint, *(["--reset", reset] if reset else [])]
    if "save_dir" in arguments or conversion.start is not None:
        words += ["--out", run_folder(str(arguments.get("save_dir", "finetuned")))]
    assert conversion.recipe is not None
    accumulate = conversion.recipe["train"]["accumulate"]
    processes = _num_processes(arguments, invocation)
    if processes > 1 and accumulate % processes == 0:
        return [f"torchrun --nproc-per-node={processes} -m subquad {shlex.join(words)}"]
    return [f"subquad {shlex.join(words)}"]


def run_folder(folder: str) -> str:
    """The run directory that stands for a folder of the original's checkpoints."""
    name = PurePosixPath(folder.rstrip("/")).name.strip("${}")  # of a variable that the text does not set
    return f"runs/{name or 'imported'}"


def checkpoint_place(path: str) -> tuple[str, str]:
    """The run that stands for a checkpoint of the original, and the name of the checkpoint there."""
    place = PurePosixPath(path.split(":")[0])
    name = place.stem.removeprefix("checkpoint").strip("_.")
    known = {"best": "best", "last": "last", "": "last", "model": "best"}
    return run_folder(str(place.parent)), known.get(name, "average" if "avg" in name else name)


def import_command(path: str, arguments: Arguments) -> str:
    """The command that makes a run of a checkpoint that the original wrote."""
    words = ["import", path, "--out", checkpoint_place(path)[0]]
    words += ["--codes", str(arguments.get("bpe_codes"))] if "bpe_codes" in arguments else []
    return f"subquad {shlex.join(words)}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _flag_words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]
