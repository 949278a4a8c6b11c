"""The result of linearising a model, and the options that its folder was begun with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from subquad.files import read_metadata, write_metadata
from subquad.linearise.options import LineariseOptions
from subquad.linearise.stages.pipeline import FORMAT, TUNED
from subquad.train.run import differences

OPTIONS = "linearise.json"
FREE = ("lengths", "save_every", "controls")
"""Options that may change when the work goes on: they change no weight of the result."""


@dataclass(frozen=True)
class Linearised:
    """A model whose attention was replaced. folder: with the saved model, the report and the checkpoints.

    report: the content of report.json.
    """

    model: nn.Module
    folder: Path
    report: dict[str, Any]

    def score(self, name: str = TUNED, metric: str | None = None) -> float:
        """Returns what a step reached, such as "teacher", "swapped", "transfer" or "finetune"; by the main metric."""
        for row in self.report["scores"]:
            if row["name"] == name:
                found: dict[str, Any] = row["metrics"]
                return float(found[metric or next(iter(found))]["value"])
        raise ValueError(f"there is no score {name!r}; there are {[row['name'] for row in self.report['scores']]}")


def check_options(path: Path, settings: Mapping[str, Any], options: LineariseOptions) -> None:
    """Writes the options of a new folder, and refuses one in which another model or other options were used."""
    now = {**settings, "options": options.model_dump(mode="json", exclude=set(FREE))}
    if path.exists():
        before = read_metadata(path, FORMAT, "linearised model", ["options"])
        if changed := differences({key: before.get(key) for key in now}, now):
            raise ValueError(
                f"{path.parent} was begun with other options ({', '.join(changed)} differ); give another --out"
            )
    write_metadata(path, {"format": FORMAT, **now})
