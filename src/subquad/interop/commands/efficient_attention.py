"""main.sh of efficient-attention, in all its forms, and the program main.py that it starts for images."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from subquad.config import nearest
from subquad.interop.checkpoints.efficient_attention.mixers import build_mixer
from subquad.interop.commands.conversion import RECIPE, Conversion
from subquad.interop.commands.efficient_attention_flags import CONTEXT_WINDOWS, DATASETS, DECODING, DICTIONARIES
from subquad.interop.commands.fairseq_tools import checkpoint_words
from subquad.interop.commands.fairseq_train import convert_arguments, run_folder
from subquad.interop.commands.flags import Arguments, read_arguments
from subquad.interop.commands.shell import Invocation
from subquad.models import PRESETS
from subquad.models.presets import OTHER_NAMES
from subquad.original_names import ATTENTION, IMAGES, MODEL, TRAINING, Flag, key

Data = dict[str, Any]

SCRIPT = {
    "-m": "model",
    "-s": "suffix",
    "-c": "checkpoint",
    "-g": "gpus",
    "-r": "resume",
    "-i": "inference",
    "-p": "data",
    "-d": "dataset",
}
LAYERS: dict[str, Data] = {
    "16layers": {"decoder_layers": 16},
    "32layers": {"decoder_layers": 32, "decoder_layerdrop": 0.2},
}
GPUS = 4
"""What the script counts on without -g."""
PROCESSES = 8
"""The script divides this by the number of GPUs to get --update-freq."""

WIDTH = 64
"""Of the mixers that are built to learn their options, which do not depend on it."""
FOLDERS = "IMAGENET"
"""The data set of main.py that is a folder of folders of images."""
IMAGE_FOLDER = "datasets/imagenet"
"""Where the script looks for images without -p."""
LEARNING_RATE, REFERENCE_BATCH = 5e-4, 512
"""The rate of main.py, which is multiplied by the images of an update over the reference."""


def convert_script(invocation: Invocation) -> Conversion:
    """Converts `bash main.sh -m MODEL -d DATASET ... -e TRUE flags of the training`."""
    options, flags = _split_script(invocation.words)
    dataset = options.get("dataset", "wikitext103")
    if dataset == "imagenet":
        return _convert_script_images(options, flags)
    if dataset not in DATASETS:
        known = ("imagenet", *DATASETS)
        raise ValueError(f"main.sh: -d {dataset} is unknown{nearest(dataset, known)} It takes {', '.join(known)}.")
    defaults, folder = DATASETS[dataset]
    data = f"{options.get('data', 'DATA')}/{folder}"
    if options.get("inference", "false").lower() == "true":
        return _convert_inference(dataset, data, options)
    gpus = int(options.get("gpus", GPUS))
    size = _size(dataset, options.get("model"))
    words = [data, *_words({**defaults, "update_freq": max(1, PROCESSES // gpus)}), *flags, *_words(size)]
    folder_of_run = options.get("resume") or f"checkpoints/{options.get('suffix', dataset)}"
    conversion = _convert_language([*words, "--save-dir", folder_of_run], gpus, dataset)
    run = run_folder(folder_of_run)
    if dataset == "wmt":
        conversion.commands.append(f"subquad average {run} --updates 10")
    conversion.commands += _evaluations(dataset, run, "average" if dataset == "wmt" else "last")
    return conversion


def _size(dataset: str, model: str | None) -> Data:
    """The flags of the model that -m names, which not all data sets have."""
    known = LAYERS if dataset == "wikitext103" else {"default": {}}
    name = next(iter(known)) if model is None else model
    if name not in known:
        raise ValueError(
            f"main.sh: -m {name} is unknown{nearest(name, known)} With -d {dataset} it takes {', '.join(known)}."
        )
    return known[name]


def _split_script(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options of main.sh by name, and the flags after `-e TRUE`."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        option = rest.pop(0)
        if option == "-e":
            return options, rest[1:]
        if option not in SCRIPT or not rest:
            raise ValueError(f"main.sh: {option}: it takes {', '.join([*SCRIPT, '-e TRUE flags'])}")
        options[SCRIPT[option]] = rest.pop(0)
    return options, []


def _words(options: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, str(value)]
    return found


# ---------------------------------------------------------------------- translation and language models


def _convert_language(words: Sequence[str], gpus: int, dataset: str) -> Conversion:
    sides = {f"--{side}-attn-{name[2:]}": flag for side in ("encoder", "decoder") for name, flag in ATTENTION.items()}
    names = {f"--attn-name-{side}": Flag(f"model.{side}.mixer.name") for side in ("encoder", "decoder")}
    arguments = read_arguments(words, TRAINING | MODEL | sides | names, "main.sh")
    conversion = convert_arguments(arguments, Invocation("main.sh", tuple(words), gpus))
    conversion.original = "efficient-attention's main.sh"
    assert conversion.recipe is not None
    side = "encoder" if dataset == "wmt" else "decoder"
    name = str(arguments.get(f"attn_name_{side}", "softmax"))
    mixer = _mixer(name, _attention_arguments(arguments, f"{side}_attn_"))
    for option in ("dims", "variant"):  # they follow from where the mixer stands
        mixer.pop(option, None)
    if side == "decoder":
        mixer["attention_dropout"] = 0.1  # of the architecture; in an encoder of the library it has no effect
    if name != "softmax":
        conversion.recipe["model"].setdefault(side, {})["mixer"] = mixer
        prefixes = (f"attn_name_{side}", f"{side}_attn_")
        given = [one.words for name, one in arguments.values.items() if name.startswith(prefixes)]
        conversion.origins[f"model.{side}.mixer"] = " ".join(given)
    return conversion


def _attention_arguments(arguments: Arguments, prefix: str) -> Data:
    """The flags of the mechanism under the names that its constructor has."""
    names = map(key, ATTENTION)
    return {name: _value(arguments.get(prefix + name)) for name in names if prefix + name in arguments}


def _value(given: Any) -> Any:
    """Numbers as numbers."""
    if not isinstance(given, str):
        return given
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def _mixer(name: str, arguments: Data) -> Data:
    """A mechanism of the library as a mixer, with the options that are no defaults."""
    arguments = {"window_size": 4} | arguments  # the default of the command line, not of the constructors
    if name == "causal_eva":
        named = {"embed_dim": WIDTH, "attn_args": arguments | {"causal": True}}
    else:
        named = {"dim": WIDTH, **arguments}
    with torch.device("meta"):
        mixer = build_mixer({"attn_name": name, "num_heads": 1, **named}).module
    return {"name": mixer.name, **mixer.config.model_dump(exclude_defaults=True, exclude={"dim", "heads", "causal"})}


def _evaluations(dataset: str, run: str, checkpoint: str) -> list[str]:
    """The commands that score a run as the script does after training."""
    if dataset == "wikitext103":
        windows = ",".join(map(str, CONTEXT_WINDOWS))
        return [f"subquad evaluate {run} --checkpoint {checkpoint} --split valid,test --context-window {windows}"]
    return [f"subquad evaluate {run} --checkpoint {checkpoint} --split test {DECODING}"]


def _convert_inference(dataset: str, data: str, options: Mapping[str, str]) -> Conversion:
    """`-i true -c CHECKPOINT`: the evaluation of the script without its training."""
    run, checkpoint, imported = checkpoint_words(options.get("checkpoint", "checkpoint_best.pt"), Arguments())
    words = [imported]
    for option, dictionary in DICTIONARIES[dataset].items():
        words += [option, shlex.quote(f"{data}/{dictionary}")]
    notes = [
        "The checkpoint of the original becomes a run, whose only checkpoint is its last one. A run that was trained "
        f"here needs no import, and --checkpoint {checkpoint}."
    ]
    commands = [" ".join(words), *_evaluations(dataset, run, "last")]
    return Conversion("efficient-attention's main.sh", commands=commands, notes=notes)


# ---------------------------------------------------------------------- images


def _convert_script_images(options: Mapping[str, str], flags: Sequence[str]) -> Conversion:
    model = options.get("model", "evit_tiny_p16")
    folder = f"imagenet_{model}_{options.get('suffix', 'default')}"
    words = ["--model", model, "--batch-size", "128", "--data-path", options.get("data", IMAGE_FOLDER)]
    words += ["--output-dir", folder, *flags]
    conversion = convert_images(Invocation("main.py", tuple(words), int(options.get("gpus", GPUS))))
    if "gpus" not in options:
        conversion.notes.append(
            f"The command has no -g, and the script counts on {GPUS} GPUs then: an update has as many batches, and the "
            "learning rate follows from its images."
        )
    return conversion


def convert_images(invocation: Invocation) -> Conversion:
    """Converts main.py of the folder vit."""
    arguments = read_arguments(invocation.words, IMAGES | ATTENTION, "main.py")
    given = str(arguments.get("model", "evit_tiny_p16"))
    name = OTHER_NAMES.get(given, given)
    if name not in PRESETS or PRESETS[name]["kind"] not in ("vision", "pyramid"):
        known = [preset for preset, data in PRESETS.items() if data["kind"] in ("vision", "pyramid")]
        raise ValueError(
            f"main.py: no preset is the model {given!r}{nearest(given, [*known, *OTHER_NAMES])} Known: "
            f"{', '.join(known)}."
        )
    batch, epochs = int(arguments.get("batch_size", 64)), int(arguments.get("epochs", 300))
    attention = str(arguments.get("attn_name", "softmax"))
    mixer = _mixer(attention, _attention_arguments(arguments, ""))
    recipe: Data = {
        "task": "image-classification",
        "data": _image_data(arguments),
        "model": _image_model(name, mixer, arguments),
        "optim": {
            "name": "adamw",
            "betas": [0.9, 0.999],
            "weight_decay": float(arguments.get("weight_decay", 0.05)),
            "decay_vectors": False,
            **({} if name in OTHER_NAMES.values() else {"no_decay": ["positions"]}),
            "clip": float(arguments.get("clip_grad", 0.0)),
        },
        "schedule": {
            "kind": "cosine-epochs",
            "lr": float(arguments.get("lr", LEARNING_RATE)) * batch * invocation.processes / REFERENCE_BATCH,
            "min_lr": float(arguments.get("min_lr", 1e-5)),
            "epochs": epochs,
            "warmup_epochs": int(arguments.get("warmup_epochs", 5)),
            "warmup_init": float(arguments.get("warmup_lr", 1e-6)),
        },
        "train": {
            "epochs": epochs,
            "budget": {"max_sentences": batch},
            "accumulate": invocation.processes,
            "seed": int(arguments.get("seed", 0)),
            "precision": "float16",
        },
    }
    if "num_workers" in arguments:
        recipe["train"]["data_workers"] = int(arguments.get("num_workers"))
    origins = _image_origins(arguments, name)
    if invocation.processes > 1:
        origins["train.accumulate"] = f"{invocation.processes} processes"
        origins["schedule.lr"] = (
            f"{origins.get('schedule.lr', LEARNING_RATE)} x images of an update / {REFERENCE_BATCH}"
        )
    if arguments.get("data_set", FOLDERS) != FOLDERS:
        arguments.unsupported[str(arguments.words("data_set"))] = "images are read from folders of classes"
    if (words_of_resume := arguments.words("resume")) is not None:
        arguments.unsupported[words_of_resume] = "the same command goes on with its --out"
    words = ["train", RECIPE, "--out", f"runs/{str(arguments.get('output_dir', given)).rstrip('/').rpartition('/')[2]}"]
    launcher = f"torchrun --nproc-per-node={invocation.processes} -m subquad" if invocation.processes > 1 else "subquad"
    commands = [f"{launcher} {shlex.join(words)}", f"subquad evaluate {words[-1]} --split valid"]
    return Conversion("efficient-attention's main.py", recipe, origins, commands, dict(arguments.unsupported))


def _image_data(arguments: Arguments) -> Data:
    folder = str(arguments.get("data_path", IMAGE_FOLDER)).rstrip("/")
    randaugment = arguments.get("aa", "rand-m9-mstd0.5-inc1")
    data: Data = {
        "images": {"train": f"{folder}/train", "valid": f"{folder}/val"},
        "augment": {
            "size": int(arguments.get("input_size", 224)),
            "randaugment": None if randaugment in ("", "None", "none") else randaugment,
            "erase": float(arguments.get("reprob", 0.25)),
            "eval_crop": 0.875,
        },
        "mixing": {
            "mixup": float(arguments.get("mixup", 0.8)),
            "cutmix": float(arguments.get("cutmix", 1.0)),
            "switch": float(arguments.get("mixup_switch_prob", 0.5)),
            "smoothing": float(arguments.get("smoothing", 0.1)),
        },
    }
    return data | ({"repeated": 3} if "repeated_aug" in arguments else {})


def _image_model(name: str, mixer: Data, arguments: Arguments) -> Data:
    drop_path = float(arguments.get("drop_path_rate", 0.1))
    if name not in OTHER_NAMES.values():
        encoder = {} if drop_path == PRESETS[name]["encoder"]["drop_path"] else {"drop_path": drop_path}
        return {"preset": name, "encoder": {**encoder, "mixer": mixer}}
    stages = [dict(stage) for stage in PRESETS[name]["stages"]]
    for stage in stages[:-1]:  # the last one has softmax attention, whatever the command says
        stage["mixer"] = dict(mixer)
    return {"preset": name, "drop_path": drop_path, "stages": stages}


def _image_origins(arguments: Arguments, preset: str) -> dict[str, str]:
    found = {
        flag.fields: given.words
        for option, flag in IMAGES.items()
        if "." in flag.fields and (given := arguments.values.get(key(option))) is not None
    }
    found.pop("model.encoder.mixer.name", None)
    names = {"attn_name", *map(key, ATTENTION)}
    mixers = [given.words for name, given in arguments.values.items() if name in names]
    is_pyramid = preset in OTHER_NAMES.values()
    found["model.stages" if is_pyramid else "model.encoder.mixer"] = " ".join(mixers)
    if words := arguments.words("drop_path_rate"):
        found["model.drop_path" if is_pyramid else "model.encoder.drop_path"] = words
    return found
