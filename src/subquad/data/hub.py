"""Data sets of the Hugging Face hub, which are written as `hub:NAME` in the place of a file."""

from typing import Any

from subquad.packages import require

HUB = "hub:"


def load_hub(name: str, subset: str | None, split: str | None) -> Any:
    """Loads a split of the data set `hub:NAME` with the library `datasets`. NAME may also be a local folder.

    No other function of subquad.data uses the network.
    """
    datasets = require("datasets", name, "hub")
    try:
        return datasets.load_dataset(name.removeprefix(HUB), subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: the library datasets cannot load its split {split}: {reason}") from None
