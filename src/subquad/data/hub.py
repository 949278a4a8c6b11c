"""Data sets of the Hugging Face hub: `hub:NAME` in the place of a file."""

from typing import Any

from subquad.packages import require

HUB = "hub:"


def load_hub(name: str, subset: str | None, split: str | None) -> Any:
    """A split of the data set `hub:NAME` through the library `datasets`, which takes local folders for names too.

    It is the only thing here that may use a network.
    """
    datasets = require("datasets", name, "hub")
    try:
        return datasets.load_dataset(name.removeprefix(HUB), subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: the library datasets cannot load its split {split}: {reason}") from None
