"""The file of a repository that lets transformers find our classes by itself, given `trust_remote_code=True`.

Whoever imports `subquad.interop.huggingface` does not need it. Others would have to know that import: with this file
and the `auto_map` of the configs, which names it, transformers imports subquad for them, or says that it is missing.
"""

from pathlib import Path
from typing import Any

STUB = "modeling_subquad"
STUB_FILE = f"{STUB}.py"
STUB_CODE = '''"""Finds the classes of this repository, which are those of `pip install 'subquad[hf]'`."""

from subquad.interop.huggingface import *  # noqa: F403
'''
MODEL_CLASSES = {
    "language-model": ("AutoModelForCausalLM", "SubquadForCausalLM"),
    "encoder-decoder": ("AutoModelForSeq2SeqLM", "SubquadForSeq2SeqLM"),
    "masked-language-model": ("AutoModelForMaskedLM", "SubquadForMaskedLM"),
    "text-classifier": ("AutoModelForSequenceClassification", "SubquadForSequenceClassification"),
    "vision": ("AutoModelForImageClassification", "SubquadForImageClassification"),
    "pyramid": ("AutoModelForImageClassification", "SubquadForImageClassification"),
}
"""For each kind of model the Auto class that loads it, and ours."""


def model_auto_map(kind: str | None) -> dict[str, str]:
    """Returns the `auto_map` of the config of a model."""
    found = {"AutoConfig": f"{STUB}.SubquadConfig"}
    if kind in MODEL_CLASSES:
        auto, ours = MODEL_CLASSES[kind]
        found[auto] = f"{STUB}.{ours}"
    return found


def write_stub(folder: str | Path) -> Path:
    path = Path(folder, STUB_FILE)
    path.write_text(STUB_CODE, encoding="utf-8")
    return path


class InstalledClass:
    """A class of an installed package. transformers would copy the code of a class that it found through a repository
    into everything that is saved; the stub stands there instead."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Does nothing."""
