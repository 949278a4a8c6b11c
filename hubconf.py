"""Entry points of torch.hub: published models of fairseq and of EVA by their names, from files that are there already.

torch.hub.load("path/of/this/checkout", "lightconv.glu.wmt17.zh-en", source="local")
"""

import importlib.util as _importing
import sys as _sys
from pathlib import Path as _Path

if _importing.find_spec("subquad") is None:  # a checkout that is not installed works too
    _sys.path.insert(0, str(_Path(__file__).parent / "src"))

from subquad.interop.checkpoints.fairseq.hub import check_name as _check_name
from subquad.interop.checkpoints.fairseq.hub import entry_points as _entry_points

dependencies = ["torch", "numpy", "safetensors", "tokenizers", "pydantic", "yaml", "sacremoses"]

# The names have dots and dashes, which no `def` can have.
globals().update(_entry_points())


def __dir__() -> list[str]:
    """All names. torch.hub asks for them to look one up, and would only say that it is not there."""
    asked = _sys._getframe(1).f_locals.get("func_name")
    if isinstance(asked, str) and asked not in globals():
        _check_name(asked)
    return list(globals())
