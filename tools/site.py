"""What the documentation site does beyond Material for MkDocs: equations, and pipes in tables.

Equations are LaTeX in fences of `math`, which GitHub shows too. On the site they become MathML, which every browser
shows without a script or a font of ours. mkdocs.yml names this file as its hook.
"""

import re
from typing import Any

CODE = re.compile(r"<code>[^<]*</code>")


def to_mathml(source: str, *_: Any, **__: Any) -> str:
    """The equation of a fence as an element of its own line."""
    from latex2mathml.converter import convert

    return f'<div class="equation">{convert(source, display="block")}</div>'


def on_page_content(html: str, **_: Any) -> str:
    """Shows `a | b` in tables, where a pipe must be written with a backslash, as it is meant."""
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), html)
