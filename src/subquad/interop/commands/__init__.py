"""Command lines of the original programs, as recipes and commands of subquad.

    convert_commands("fairseq-train data-bin/iwslt14 -a lightconv_iwslt_de_en --dropout 0.3 ...").to_text().to_yaml()

Nothing of the command is executed. What it trains becomes a recipe whose lines name the flags that they came from; what
has no counterpart is listed with the reason.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from subquad.interop.commands import efficient_attention, fairseq_tools, fairseq_train, linformer, primal
from subquad.interop.commands.conversion import RECIPE as RECIPE
from subquad.interop.commands.conversion import Conversion as Conversion
from subquad.interop.commands.shell import Invocation, split_commands

PROGRAMS = {
    "fairseq-train": fairseq_train.convert_training,
    "fairseq-generate": fairseq_tools.convert_generation,
    "fairseq-interactive": fairseq_tools.convert_interaction,
    "fairseq-validate": fairseq_tools.convert_generation,
    "fairseq-eval-lm": fairseq_tools.convert_language_evaluation,
    "fairseq-preprocess": fairseq_tools.convert_preparation,
    "average_checkpoints": fairseq_tools.convert_averaging,
}
SCRIPTS = {name.removeprefix("fairseq-").replace("-", "_"): name for name in PROGRAMS if name.startswith("fairseq-")}
"""The programs of fairseq as modules of fairseq_cli."""


BUILDS = ("build", "setup", "cuda_function_gen")
"""Scripts that build containers and kernels."""


def convert_commands(text: str, folder: Path = Path()) -> Conversion:
    """Converts a text of commands into one conversion: at most one training, and what follows it."""
    found = convert_command(text, folder)
    trainings = [one for one in found if one.recipe is not None]
    if len(trainings) > 1:
        raise ValueError(f"these are {len(trainings)} trainings; give one at a time, with what belongs to it")
    first, *rest = [*trainings, *(one for one in found if one.recipe is None)]
    for one in rest:
        one = _join_preparation(first, one)
        first.commands += one.commands
        first.notes += [note for note in one.notes if note not in first.notes]
        first.unsupported |= one.unsupported
    return first


def _join_preparation(training: Conversion, other: Conversion) -> Conversion:
    """Lets a training read the text of the preparation that the same commands begin with, unless its folder exists.

    Returns what is left to be said and done of the other command.
    """
    given = (training.recipe or {}).get("data", {}).get("fairseq")
    folder = given["path"] if isinstance(given, Mapping) else given
    if other.text is None or folder is None or PurePosixPath(other.text[0]) != PurePosixPath(folder):
        return other
    if Path(folder).is_dir():
        notes = [f"{folder} exists, and is read as it is: nothing has to be prepared."]
        return Conversion(other.original, unsupported=other.unsupported, notes=notes)
    assert training.recipe is not None
    section = {name: value for name, value in training.recipe["data"].items() if name != "fairseq"}
    training.recipe["data"] = other.text[1] | section
    training.origins.pop("data.fairseq", None)
    training.origins |= other.origins
    notes = [
        f"There is no folder {folder}: the recipe reads the text that fairseq-preprocess would put there, and `subquad "
        f"train` prepares it. Where the folder is, data.fairseq={folder} takes the place of the text."
    ]
    return Conversion(other.original, unsupported=other.unsupported, notes=notes)


def convert_command(text: str, folder: Path = Path()) -> list[Conversion]:
    """Converts a text of one or several commands. folder: where relative paths of configs begin."""
    found = []
    for invocation in split_commands(text):
        found.append(_convert(invocation, folder))
        found[-1].notes += [
            f"The text does not set ${name}: put the line that sets it in front, or change what stands for it here."
            for name in invocation.unset_variables
        ]
    return found


def _convert(invocation: Invocation, folder: Path) -> Conversion:
    name = invocation.name
    if primal.is_primal(invocation):
        return primal.convert(invocation)
    if "fairseq_cli" in invocation.program and name in SCRIPTS:
        invocation = Invocation(SCRIPTS[name], invocation.words, invocation.processes, invocation.gpus)
        return PROGRAMS[invocation.program](invocation)
    if name in PROGRAMS:
        return PROGRAMS[name](invocation)
    if name in BUILDS:
        return Conversion(
            invocation.program, notes=["Nothing has to be built: kernels compile when they are first used."]
        )
    if name == "main" and invocation.program.endswith(".sh"):
        return efficient_attention.convert_script(invocation)
    if name == "main" and any(word in ("--attn-name", "--model") for word in invocation.words):
        return efficient_attention.convert_images(invocation)
    if name == "run" and invocation.program.endswith(".sh"):
        return linformer.convert(invocation, folder)
    if name in ("train_my", "train_mt", "compare_performance", "pretokenize_dataset", "evaluate"):
        moved = Invocation("run.sh", (invocation.program, *invocation.words), invocation.processes, invocation.gpus)
        return linformer.convert(moved, folder)
    known = ", ".join([*PROGRAMS, "main.sh", "main.py", "train_efficiency.py", "run.sh"])
    raise ValueError(f"{invocation.program}: this program is not known; those that are: {known}")
