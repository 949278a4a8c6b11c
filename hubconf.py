"""Entry points of torch.hub: fairseq's published models by their names, from files that are there already.

torch.hub.load("path/of/this/checkout", "lightconv.glu.wmt17.zh-en", source="local")
"""

import importlib.util as _importing
import sys as _sys
from pathlib import Path as _Path

if _importing.find_spec("subquad") is None:  # a checkout that is not installed works too
    _sys.path.insert(0, str(_Path(__file__).parent / "src"))

from subquad.interop.checkpoints.fairseq.hub import entry_points as _entry_points

dependencies = ["torch", "numpy", "safetensors", "tokenizers", "pydantic", "yaml", "sacremoses"]

# The names have dots and dashes, which no `def` can have.
globals().update(_entry_points())
