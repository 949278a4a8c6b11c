"""PrimalAttention_NLP: fairseq_cli/train.py of its fork, and train_efficiency.py, which measures one epoch."""

from subquad.interop.commands.conversion import RECIPE, Conversion
from subquad.interop.commands.fairseq_train import convert_training
from subquad.interop.commands.shell import Invocation
from subquad.mixers import mixer_class
from subquad.models import PRESETS

ETA = 0.1
"""The weight of the regulariser in the fork's loss, which is summed over the tokens of a batch."""
NOTE = (
    "The fork of PrimalAttention fixes what no flag says: five layers of softmax attention and one of primal attention "
    f"of rank 30, and {ETA} times the regulariser in the loss of a batch."
)


def is_primal(invocation: Invocation) -> bool:
    """Whether a command is of the fork: its efficiency test, or fairseq_cli/train.py with a word that says primal."""
    if invocation.name == "train_efficiency":
        return True
    script = invocation.program.endswith(".py") and "fairseq_cli" in invocation.program and invocation.name == "train"
    return script and any("primal" in word.lower() for word in invocation.words)


def convert(invocation: Invocation) -> Conversion:
    """Converts the training of a language model with primal attention in its last layer."""
    conversion = convert_training(invocation)
    recipe = conversion.recipe
    assert recipe is not None
    recipe["model"]["preset"] = "primal_lm"
    recipe["model"].setdefault("decoder", {})["mixer"] = PRESETS["primal_lm"]["decoder"]["mixer"]
    tokens = recipe["train"].get("budget", {}).get("max_tokens")
    published = mixer_class("primal").published["wikitext103"]["train.aux_weight"]
    recipe["train"]["aux_weight"] = ETA / tokens if tokens else published
    conversion.original = "PrimalAttention"
    conversion.notes.insert(0, NOTE)
    if invocation.name == "train_efficiency":
        measured = f"subquad bench --recipe {RECIPE} --mixers softmax,recipe"
        conversion.commands = [measured]
        conversion.notes.append(
            "Time and memory of an epoch follow from a few updates; the command says from how many."
        )
    return conversion
