"""When a training ends, and which option ends it."""

from typing import NamedTuple

from subquad.train.recipe import Recipe
from subquad.train.schedules import Schedule


class End(NamedTuple):
    """Why a training ends. reason: the option that ends it, such as train.updates. text: the same in words."""

    reason: str
    text: str


def find_end(
    recipe: Recipe, schedule: Schedule, *, update: int, epoch: int, late: bool, bad_validations: int, ended_early: bool
) -> End | None:
    """Returns why a training ends after so many updates and epochs; None: it goes on.

    late: whether its time is up. bad_validations: so many in a row were no new best. ended_early: whether what asked to
    be asked after validations has ended it.
    """
    config = recipe.train
    if ended_early:
        return End("early", "it was ended early after a validation")
    if config.updates is not None and update >= config.updates:
        return End("train.updates", f"train.updates is {config.updates:,}")
    if config.epochs is not None and epoch >= config.epochs:
        return End("train.epochs", f"train.epochs is {config.epochs:,}")
    if late:
        return End("train.minutes", f"train.minutes is {config.minutes:g}")
    if config.patience is not None and bad_validations >= config.patience:
        return End("train.patience", f"train.patience is {config.patience:,}: so many validations were no new best")
    if schedule.finished(update, epoch):
        rate, lowest = schedule.learning_rate(update, epoch), schedule.config.stop_lr
        return End("schedule.stop_lr", f"the learning rate is {rate:g}, and schedule.stop_lr is {lowest:g}")
    return None
