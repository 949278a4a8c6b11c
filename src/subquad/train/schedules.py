"""Learning rates as pure functions: a schedule keeps no state, so a resumed run follows the same curve.

    rate(u, e)      the rate of update number u + 1: u updates and e epochs are done

    constant        lr
    inverse-sqrt    lr * sqrt(warmup / u)                                                          (fairseq)
    cosine          from lr down to min_lr along half a cosine, in periods of updates that grow by period_mult; both
                    ends are multiplied by shrink in every further period                          (fairseq, SGDR)
    linear          from lr to min_lr, reached at `total` updates
    onecycle-linear up from lr / 25, then down to lr / 250,000, both straight; the momentum is not cycled    (torch)
    cosine-epochs   half a cosine over `epochs`, constant within an epoch, then min_lr             (timm, DeiT)

All but onecycle-linear rise linearly from warmup_init to lr over the warm-up first. The cosine by epochs runs on during
the warm-up, as in timm: it counts from the first epoch.
"""

import math
from typing import Literal

from pydantic import Field

from subquad.config import Options

Kind = Literal["constant", "inverse-sqrt", "cosine", "linear", "onecycle-linear", "cosine-epochs"]

USED: dict[str, set[str]] = {
    "constant": {"warmup_updates", "warmup_init"},
    "inverse-sqrt": {"warmup_updates", "warmup_init"},
    "cosine": {"warmup_updates", "warmup_init", "min_lr", "period", "period_mult", "shrink", "total"},
    "linear": {"warmup_updates", "warmup_init", "min_lr", "total"},
    "onecycle-linear": {"warmup_updates", "total"},
    "cosine-epochs": {"warmup_updates", "warmup_init", "min_lr", "epochs", "warmup_epochs", "cooldown_epochs"},
}
"""Options of each kind, besides those that all have."""


class ScheduleConfig(Options):
    """Options of the learning rate."""

    kind: Kind = Field("inverse-sqrt", description="The shape of the curve.")
    lr: float = Field(5e-4, gt=0, description="The highest learning rate.")
    warmup_updates: int = Field(0, ge=0, description="The number of updates over which the rate rises to lr.")
    warmup_init: float | None = Field(
        None,
        ge=0,
        description="The rate of the first update of a warm-up. By default it is min_lr, or 0 for curves without.",
    )
    min_lr: float = Field(0.0, ge=0, description="The lowest rate after the warm-up.")
    period: int | None = Field(None, ge=1, description="For cosine: the updates of the first period; by default all.")
    period_mult: float = Field(1.0, ge=1, description="For cosine: the factor by which each further period is longer.")
    shrink: float = Field(1.0, gt=0, le=1, description="For cosine: the factor of lr and min_lr in a further period.")
    total: int | None = Field(None, ge=1, description="The updates of the whole curve. By default those of the run.")
    epochs: int | None = Field(
        None, ge=1, description="For cosine-epochs: the epochs of the curve. By default those of the run."
    )
    warmup_epochs: int = Field(0, ge=0, description="For cosine-epochs: the epochs of warm-up, one rate for each.")
    cooldown_epochs: int = Field(0, ge=0, description="For cosine-epochs: the epochs at min_lr after the curve.")
    stop_lr: float | None = Field(None, ge=0, description="The run ends when the rate has fallen to this.")

    def check(self) -> None:
        for name, field in type(self).model_fields.items():
            known = name in USED[self.kind] or name in ("kind", "lr", "stop_lr")
            if not known and getattr(self, name) != field.default:
                kinds = [kind for kind, used in USED.items() if name in used]
                whole = f"schedule:={{kind: {self.kind}, ...}} on a command line replaces the whole section"
                raise ValueError(
                    f"a schedule of kind {self.kind} has no {name}; of kind {' or '.join(kinds)} it has; {whole}"
                )
        if self.kind == "inverse-sqrt" and self.warmup_updates == 0:
            raise ValueError("a schedule of kind inverse-sqrt needs warmup_updates: its curve starts from them")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr:g}, above lr, {self.lr:g}")
        if self.warmup_updates and self.warmup_epochs:
            raise ValueError("give warmup_updates or warmup_epochs, not both")
        if self.total is not None and self.warmup_updates >= self.total:
            raise ValueError(f"warmup_updates is {self.warmup_updates}; it must be below total, {self.total}")

    def unfinished_warmup(self, updates: int | None, epochs: int | None) -> str | None:
        """Returns a warning if a run of so many updates or epochs ends before its warm-up does."""
        spans = ((self.warmup_updates, updates, "updates"), (self.warmup_epochs, epochs, "epochs"))
        for warmup, length, unit in spans:
            if length is not None and warmup > length:
                return (
                    f"the warm-up of {warmup:,} {unit} is longer than the run of {length:,}: the rate never reaches "
                    f"{self.lr:g}; lower schedule.warmup_{unit}, or train longer"
                )
        return None


class Schedule:
    """The curve of a config. total and epochs: the length of the run, which is used where the config gives none."""

    def __init__(self, config: ScheduleConfig, total: int | None = None, epochs: int | None = None) -> None:
        self.config = config
        self.total = config.total or total
        cool = config.cooldown_epochs
        self.curve_epochs = config.epochs or (None if epochs is None else epochs - cool)
        needs_total = config.kind in ("linear", "onecycle-linear") or (config.kind == "cosine" and not config.period)
        if needs_total:
            if self.total is None:
                raise ValueError(f"a schedule of kind {config.kind} needs its length; give total, or the run's updates")
            if config.warmup_updates >= self.total:
                raise ValueError(
                    f"warmup_updates is {config.warmup_updates}; the run has only {self.total} updates: "
                    "lower schedule.warmup_updates, or train longer"
                )
        if config.kind == "cosine-epochs":
            if self.curve_epochs is None:
                raise ValueError("a schedule of kind cosine-epochs needs its length; give epochs, or the run's epochs")
            if self.curve_epochs < 1:
                raise ValueError(f"cooldown_epochs is {cool}; it must be below the run's {epochs} epochs")
        start = config.min_lr if config.kind in ("cosine", "cosine-epochs", "linear") else 0.0
        self.warmup_init = start if config.warmup_init is None else config.warmup_init

    @property
    def epochs(self) -> int | None:
        """Epochs of the whole curve, the cool-down included; None where the curve goes by updates."""
        return None if self.curve_epochs is None else self.curve_epochs + self.config.cooldown_epochs

    def learning_rate(self, update: int, epoch: int = 0) -> float:
        """Returns the rate of the next update after `update` updates and `epoch` epochs."""
        config = self.config
        if config.kind == "onecycle-linear":
            return self._onecycle(update)
        if update < config.warmup_updates:
            return self.warmup_init + update * ((config.lr - self.warmup_init) / config.warmup_updates)
        if epoch < config.warmup_epochs:
            return self.warmup_init + epoch * ((config.lr - self.warmup_init) / config.warmup_epochs)
        if config.kind == "inverse-sqrt":
            return config.lr * config.warmup_updates**0.5 * update**-0.5
        if config.kind == "cosine":
            return self._cosine(update - config.warmup_updates)
        if config.kind == "linear":
            assert self.total is not None
            left = max(0, self.total - update) / (self.total - config.warmup_updates)
            return config.min_lr + (config.lr - config.min_lr) * left
        if config.kind == "cosine-epochs":
            assert self.curve_epochs is not None
            return _half_cosine(config.lr, config.min_lr, min(epoch, self.curve_epochs), self.curve_epochs)
        return config.lr

    def finished(self, update: int, epoch: int = 0) -> bool:
        """Whether the rate has fallen to stop_lr; a warm-up starts low and does not count."""
        config = self.config
        if config.stop_lr is None or update < config.warmup_updates or epoch < config.warmup_epochs:
            return False
        return self.learning_rate(update, epoch) <= config.stop_lr

    def _cosine(self, update: int) -> float:
        """Returns the rate of the cosine. update: counted from the end of the warm-up."""
        config = self.config
        assert config.period is not None or self.total is not None
        length: float = config.period or (self.total or 0) - config.warmup_updates
        if config.period_mult == 1:
            number, start = update // length, update // length * length
        else:
            mult = config.period_mult
            number = math.floor(math.log(1 - update / length * (1 - mult), mult))
            start = (1 - mult**number) / (1 - mult) * length
            length *= mult**number
        scale = config.shrink**number
        return _half_cosine(config.lr * scale, config.min_lr * scale, update - start, length)

    def _onecycle(self, update: int) -> float:
        """torch's OneCycleLR with anneal_strategy="linear", pct_start = warmup_updates / total; stays at its end."""
        assert self.total is not None
        highest = self.config.lr
        first, last = highest / 25, highest / 25 / 1e4
        peak, end = float(self.config.warmup_updates) - 1, float(self.total) - 1
        if update <= peak and peak > 0:
            return first + (highest - first) * (update / peak)
        if end <= max(peak, 0):
            return last
        passed = min(1.0, (update - peak) / (end - peak))
        return highest + (last - highest) * passed


def _half_cosine(highest: float, lowest: float, passed: float, length: float) -> float:
    return lowest + 0.5 * (highest - lowest) * (1 + math.cos(math.pi * passed / length))
