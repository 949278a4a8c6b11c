"""The table of models whose attention can be swapped says what happens."""

from pathlib import Path

from subquad.interop.patching.swap import ADAPTERS, REFUSED
from tests.interop.swap_hosts import HOSTS, timm_swin, timm_vit, tiny, torch_encoder
from tools.markdown import fill_between
from tools.swap_table import BEGIN, END, swap_table

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"


def test_the_table_is_current() -> None:
    text = PAGE.read_text()
    assert text == fill_between(text, BEGIN, END, swap_table(), PAGE.name), "run `make docs`"


def test_every_known_attention_layer_is_tried() -> None:
    models = [tiny(*host) for host in HOSTS.values()] + [timm_vit(), timm_swin(), torch_encoder()]
    tried = {f"{type(part).__module__}.{type(part).__qualname__}" for model in models for part in model.modules()}
    assert tried >= ADAPTERS.keys() | REFUSED.keys()
