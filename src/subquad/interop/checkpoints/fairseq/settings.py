"""Converts the training options of fairseq's checkpoints to sections of a recipe.

Until 2020 a checkpoint has `args`, one namespace with all options. Since then it has `cfg`, with a group of options for
each part (`model`, `optimization`, `task`, ...).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from subquad.interop.checkpoints.safe_pickle import to_plain_options
from subquad.train.optim import OptimConfig
from subquad.train.schedules import Schedule, ScheduleConfig

GROUPS = ("common", "distributed_training", "dataset", "optimization", "criterion", "optimizer", "lr_scheduler", "task")
CHOICES = ("criterion", "optimizer", "lr_scheduler", "task")
"""Groups with the name of what was chosen. In `args` this name is an option that is called like the group."""
BREAKS = {"none": "none", "complete": "complete", "complete_doc": "complete", "eos": "eos"}
UNSUPPORTED_MASKING = {"mask_whole_words": False, "freq_weighted_replacement": False, "mask_multiple_length": 1}
"""Options of masked_lm that are not supported, with their defaults."""
DECODE = {"beam": 5, "nbest": 1, "lenpen": 1.0, "max_len_a": 0.0, "max_len_b": 200, "min_len": 1, "unk_penalty": 0.0}
"""The defaults of fairseq-generate."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """architecture: as in `--arch`. model: the options of the model. all: the options of all groups in one mapping."""

    architecture: str
    model: dict[str, Any]
    all: dict[str, Any]


@dataclass
class Sections:
    """Sections of a recipe, and notes about what they leave out."""

    recipe: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_settings(contents: Values) -> Settings:
    """Returns the options of a checkpoint in either layout."""
    if contents.get("args") is not None:
        everything = to_plain_options(contents["args"])
        return Settings(str(everything.get("arch", "")), everything, everything)
    groups = {name: to_plain_options(group) for name, group in contents["cfg"].items() if _is_group(group)}
    model = groups.get("model", {})
    everything = {key: value for name in GROUPS for key, value in groups.get(name, {}).items()}
    everything |= {name: groups.get(name, {}).get("_name") for name in CHOICES}
    return Settings(str(model.get("arch") or model.get("_name") or ""), model, everything)


def _is_group(value: Any) -> bool:
    return value is not None and not isinstance(value, str | int | float)


def recipe_sections(settings: Values, update: int) -> Sections:
    """Returns the sections of a recipe about training and decoding. update: how many updates are done."""
    found = Sections({"decode": dict(DECODE)})
    found.recipe["train"] = _train_section(settings, update)
    _add_optimizer(found, settings)
    _add_schedule(found, settings)
    if settings.get("task") in ("language_modeling", "masked_lm"):
        found.recipe["data"] = {"blocks": _block_options(settings)}
    if settings.get("task") == "masked_lm":
        found.recipe["data"] |= {
            "masking": _mask_options(settings),
            "max_length": _longest_line(found.recipe["data"]["blocks"]),
        }
        if left := [
            name for name, usual in UNSUPPORTED_MASKING.items() if settings.get(name, usual) not in (usual, None)
        ]:
            found.notes.append(f"tokens are masked one by one; the original's {', '.join(left)} is not supported")
    return found


def _train_section(settings: Values, update: int) -> dict[str, Any]:
    train: dict[str, Any] = {}
    if (most := int(settings.get("max_update") or 0)) > 0:
        train["updates"] = max(most, update)
    elif (epochs := int(settings.get("max_epoch") or 0)) > 0:
        train["epochs"] = epochs
    budget = {"max_tokens": settings.get("max_tokens")}
    budget["max_sentences"] = settings.get("batch_size") or settings.get("max_sentences")
    if any(budget.values()):
        train["budget"] = budget | {"multiple": settings.get("required_batch_size_multiple", 8)}
    processes = int(settings.get("distributed_world_size") or 1)
    train["accumulate"] = processes * int(_first_value(settings.get("update_freq"), 1))
    train["smoothing"] = float(settings.get("label_smoothing") or 0.0)
    train["seed"] = int(settings.get("seed") or 1)
    return train


def _add_optimizer(found: Sections, settings: Values) -> None:
    name = settings.get("optimizer")
    common = {"weight_decay": _number(settings, "weight_decay"), "clip": max(0.0, _number(settings, "clip_norm"))}
    if name == "adam":
        betas = settings.get("adam_betas", "(0.9, 0.999)")
        own: dict[str, Any] = {"betas": _parse_numbers(betas), "eps": _number(settings, "adam_eps", 1e-8)}
    elif name in ("nag", "sgd"):
        own = {"momentum": _number(settings, "momentum", 0.99 if name == "nag" else 0.0)}
    else:
        name, own = OptimConfig().name, {}
        found.notes.append(f"the optimiser {settings.get('optimizer')!r} is not supported; the recipe has {name}")
    found.recipe["optim"] = {"name": name, **own, **common}


def _add_schedule(found: Sections, settings: Values) -> None:
    """Adds the schedule. One that is not supported or does not fit the run becomes a constant rate, with a note."""
    rate = float(_first_value(settings.get("lr"), 0.0)) or ScheduleConfig.model_fields["lr"].default
    train = found.recipe["train"]
    name = settings.get("lr_scheduler") or "fixed"  # the default of fairseq
    try:
        options = _schedule_options(str(name), settings, rate)
        Schedule(ScheduleConfig.parse("schedule", options), train.get("updates"), train.get("epochs"))
    except ValueError as error:
        options = {"kind": "constant", "lr": rate}
        found.notes.append(
            f"the recipe has a constant learning rate, because the original's schedule is not supported: {error}"
        )
    found.recipe["schedule"] = options


def _schedule_options(name: str, settings: Values, rate: float) -> dict[str, Any]:
    warmup = int(settings.get("warmup_updates") or 0)
    options: dict[str, Any] = {"lr": rate, "warmup_updates": warmup}
    start = _number(settings, "warmup_init_lr", -1.0)
    if start >= 0 and warmup:
        options["warmup_init"] = start
    # the rate that ends training was called min_lr before stop_min_lr existed
    stop = _number(settings, "stop_min_lr" if "stop_min_lr" in settings else "min_lr", -1.0)
    if stop > 0:
        options["stop_lr"] = stop
    if name == "fixed":
        return options | {"kind": "constant"}
    if name == "inverse_sqrt":
        return options | {"kind": "inverse-sqrt"}
    if name == "cosine":
        highest = settings.get("max_lr")  # the older options, where lr is the lowest rate
        ends = {"lr": highest, "min_lr": rate} if highest else {"min_lr": _number(settings, "min_lr")}
        period = int(settings.get("lr_period_updates") or 0)
        growth = {"period_mult": _number(settings, "t_mult", 1.0), "shrink": _number(settings, "lr_shrink", 0.1)}
        return options | ends | {"kind": "cosine", "period": period if period > 0 else None} | growth
    if name == "polynomial_decay" and _number(settings, "power", 1.0) == 1.0:
        total = int(float(settings.get("total_num_update") or 0))
        return options | {"kind": "linear", "min_lr": _number(settings, "end_learning_rate"), "total": total or None}
    raise ValueError(f"the schedule {name!r} is not known")


def _block_options(settings: Values) -> dict[str, Any]:
    breaks = str(settings.get("sample_break_mode") or "none").lower()
    return {"tokens_per_sample": int(settings.get("tokens_per_sample") or 1024), "breaks": BREAKS.get(breaks, "none")}


def _mask_options(settings: Values) -> dict[str, float]:
    names = {"share": ("mask_prob", 0.15), "kept": ("leave_unmasked_prob", 0.1), "random": ("random_token_prob", 0.1)}
    return {ours: _number(settings, theirs, default) for ours, (theirs, default) in names.items()}


def _longest_line(blocks: Mapping[str, Any]) -> int | None:
    """Returns the longest line that fits into a sample, with the first token of a sample and the eos of a line."""
    return None if blocks["breaks"] == "none" else max(1, blocks["tokens_per_sample"] - 2)


def _first_value(given: Any, default: Any) -> Any:
    """Returns the value of the first epoch, if there is a list of values."""
    if isinstance(given, list | tuple):
        return given[0] if given else default
    return default if given is None else given


def _number(settings: Values, name: str, default: float = 0.0) -> float:
    value = settings.get(name)
    return default if value is None else float(value)


def _parse_numbers(given: Any) -> list[float]:
    """Returns the numbers of a list, or of a text such as "(0.9, 0.98)"."""
    parts = re.findall(r"[\d.eE+-]+", given) if isinstance(given, str) else given
    return [float(part) for part in parts]
