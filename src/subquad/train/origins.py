"""Where the mechanisms of a run came from, as its environment.json says: a run of another package's needs that package.

Nothing is imported because a file names it: what is missing is named, and the user decides.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.files import wrap_corrupt_data_errors
from subquad.mixers.registry import check_origins, origins
from subquad.nn.stack import mixer_names

ENVIRONMENT = "environment.json"
MECHANISMS = "mechanisms"


def describe_origins(model: Mapping[str, Any]) -> dict[str, Any]:
    """For environment.json: the mechanisms of other packages in a model's config; nothing if there are none."""
    found = origins(sorted(mixer_names(model)))
    return {MECHANISMS: found} if found else {}


def check_stored_origins(folder: Path) -> None:
    """Refuses a run whose mechanisms are not here, and says which package they came from."""
    path = folder / ENVIRONMENT
    if not path.is_file():
        return
    with wrap_corrupt_data_errors(f"{path}"):
        try:
            stored = json.loads(path.read_text()).get(MECHANISMS, {})
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        check_origins(f"the run {folder}", stored)
