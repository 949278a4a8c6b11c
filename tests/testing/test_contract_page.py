"""The page of the contract lists its tests."""

import re
from pathlib import Path

from subquad.testing import MixerContract

PAGE = Path(__file__).parents[2] / "docs/guides/contract.md"


def test_the_page_lists_every_property() -> None:
    listed = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert listed == {name for name in dir(MixerContract) if name.startswith("test_")}
