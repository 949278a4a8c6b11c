"""torchvision's image functions, on machines where its compiled part does not load as well."""

import functools
import sys
from typing import Any

import torch

from subquad.packages import require

# torchvision registers shape functions for these when it is imported, and fails if its compiled part is absent
# (a build for another torch). Image functions do not use them; declared without an implementation they are harmless.
COMPILED = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@functools.cache
def import_torchvision() -> Any:
    """The module torchvision.transforms.v2.functional."""
    try:
        return _functional()
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # what the failed import left behind
    for name, schema in COMPILED.items():
        torch.library.define(name, schema)
    try:
        return _functional()
    except RuntimeError as error:
        raise ValueError(f"torchvision does not fit torch {torch.__version__}: {error}") from None


def _functional() -> Any:
    return require("torchvision.transforms.v2.functional", "image augmentation", "vision")
