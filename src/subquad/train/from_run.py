"""A run that begins with the weights of another one: what it takes over, and what begins anew.

    subquad train --from-run runs/old --reset optimizer,schedule model.encoder.dropout=0.3 --out runs/new

The new run has a recipe of its own, and the other run's tokenizers. Before its first update the trainer writes its
first checkpoint, so that it goes on like any other; until then from_run.json says what it begins with.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from subquad.config import nearest
from subquad.data.tokenizers import check_same_tokens, load_tokenizer
from subquad.files import read_metadata, write_metadata
from subquad.tasks.base import TOKENIZERS, Task
from subquad.train.checkpoint import (
    Checkpoint,
    TrainState,
    has_weights_only,
    load_checkpoint,
    load_weights_of,
    read_state,
)
from subquad.train.recipe import Changes, Recipe, read_recipe
from subquad.train.run_folder import RECIPE

FROM_RUN = "from_run.json"
FORMAT = 1
OPTIMIZER, SCHEDULE = "optimizer", "schedule"
RESETTABLE = (OPTIMIZER, SCHEDULE)
"""What may begin anew: the moments of the optimiser; the count of updates and epochs, which learning rates follow."""


@dataclass(frozen=True)
class RunStart:
    """What a run begins with.

    run: the directory of the other run, and its recipe. checkpoint: the folder of one of its checkpoints. reset: those
    of RESETTABLE that begin anew.
    """

    run: Path
    recipe: Recipe
    checkpoint: Path
    reset: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.reset:
            if name not in RESETTABLE:
                known = " and ".join(RESETTABLE)
                raise ValueError(f"--reset knows {known}, not {name!r}{nearest(name, RESETTABLE)}")

    def recipe_of_new_run(self, recipe: Any, changes: Changes) -> Recipe:
        """The recipe of the new run: the other run's, or another one of the same task, with changes.

        recipe: see `read_recipe`. Text is read with the other run's tokenizers, so that tokens keep their numbers.
        """
        new = read_recipe(self.run / RECIPE if recipe is None else recipe, changes)
        if new.task != self.recipe.task:
            raise ValueError(
                f"{self.run} is a run of task {self.recipe.task}; its weights are of no use for {new.task}"
            )
        named = {word.partition("=")[0] for word in changes if isinstance(word, str)}
        if wrong := [name for name in named if name.startswith(("data.tokenizer", "data.target_tokenizer"))]:
            raise ValueError(f"{wrong[0]}: text is read with the tokenizers of {self.run}; leave the option out")
        return new.model_copy(update={"data": new.data.with_run_tokenizers()})

    # ------------------------------------------------------------------ the new run directory

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What a run began with, or will begin with; None: with random weights."""
        if not (folder / FROM_RUN).exists():
            return None
        found = read_metadata(folder / FROM_RUN, FORMAT, "start of a run", ["run", "checkpoint", "reset"])
        run = Path(found["run"])
        return cls(run, read_recipe(run / RECIPE), Path(found["checkpoint"]), tuple(found["reset"]))

    def write(self, folder: Path) -> None:
        """Gives a new run directory the tokenizers of the other run, and writes what it begins with."""
        for saved in sorted((self.run / TOKENIZERS).glob("*/")):
            load_tokenizer(saved).save(folder / TOKENIZERS / saved.name)
        paths = {"run": str(self.run.resolve()), "checkpoint": str(self.checkpoint.resolve())}
        write_metadata(folder / FROM_RUN, {"format": FORMAT, **paths, "reset": sorted(self.reset)})

    def check_began(self, folder: Path) -> None:
        """Refuses to go on with a run that began with something else."""
        if not (folder / FROM_RUN).exists():
            raise ValueError(f"{folder} holds a run that did not begin with {self.run}; give another --out")
        before: dict[str, Any] = read_metadata(folder / FROM_RUN, FORMAT, "start of a run", ["run", "reset"])
        if before["run"] != str(self.run.resolve()) or before["reset"] != sorted(self.reset):
            reset = f" and --reset {','.join(before['reset'])}" if before["reset"] else ""
            raise ValueError(
                f"{folder} holds a run that began with --from-run {before['run']}{reset}: give the same, or another "
                "--out"
            )

    # ------------------------------------------------------------------ its first checkpoint

    def first_checkpoint(self, recipe: Recipe) -> Checkpoint:
        """The other run's checkpoint as the beginning of a run by `recipe`, without what is reset.

        If nothing is reset and the data is the same, the new run goes on exactly as the other one would have. If the
        optimiser is reset, weights are those that validation used: a moving average, if there is one.
        """
        state = read_state(self.checkpoint)
        if OPTIMIZER in self.reset:
            weights = load_weights_of(self.checkpoint)
            saved = Checkpoint(weights, {}, replace(state, scaler={}), rng={}, ema=weights)
        else:
            self._check_optimizer(recipe)
            saved = load_checkpoint(self.checkpoint)
            saved = replace(saved, ema=saved.ema or saved.model, rng={} if self.reset else saved.rng)
        counts = TrainState() if SCHEDULE in self.reset else state
        at_batch = counts.cursor.get("batch", 0) if self._has_same_batches(recipe) else 0
        return replace(
            saved,
            state=TrainState(
                counts.update,
                counts.epoch,
                epoch_end=at_batch == 0,
                cursor={"epoch": counts.epoch, "batch": at_batch},
                scaler=saved.state.scaler,
                extra={"bad_validations": 0, "best": None, "minutes": 0.0},
            ),
        )

    def _check_optimizer(self, recipe: Recipe) -> None:
        if has_weights_only(self.checkpoint):
            raise ValueError(
                f"{self.checkpoint} has weights and no state of an optimiser, which therefore begins anew: give "
                "--reset optimizer"
            )
        before, now = self.recipe.optim.name, recipe.optim.name
        if before != now:
            raise ValueError(
                f"optim.name is {now}, and {self.run} was trained with {before}, whose state it cannot take over: give "
                "--reset optimizer"
            )

    def _has_same_batches(self, recipe: Recipe) -> bool:
        """Whether an epoch has the batches that it had in the other run, so that its first ones can be left out."""
        before, now = self.recipe, recipe
        return (
            before.data.with_run_tokenizers() == now.data.with_run_tokenizers()
            and before.train.budget == now.train.budget
            and before.train.seed == now.train.seed
        )


def check_tokens(task: Task, folder: Path) -> None:
    """Refuses data whose tokens have other numbers than those of the tokenizers that a run directory has."""
    for side, tokenizer in task.tokenizers().items():
        if (saved := folder / TOKENIZERS / side).is_dir():
            check_same_tokens(load_tokenizer(saved), tokenizer, f"the tokenizer of the data ({side})")
