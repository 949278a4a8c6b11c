"""Packages that only some data needs, and what they are asked for. One that is missing is named, with its extra."""

import importlib
from typing import Any

HUB = "hub:"


def optional_module(name: str, what: str, install: str = "'subquad[hub]'") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ValueError(f"{what} needs the package {package}: pip install {install}") from None


def load_hub(name: str, subset: str | None, split: str | None) -> Any:
    """A split of the data set `hub:NAME` through the library `datasets`, which takes local folders for names too.

    It is the only thing here that may use a network.
    """
    datasets = optional_module("datasets", name)
    try:
        return datasets.load_dataset(name.removeprefix(HUB), subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: the library datasets cannot load its split {split}: {reason}") from None
