"""Draws the figures of docs/mechanisms/ from the real modules: `python docs/figures/draw.py [FOLDER]`.

A figure of a mechanism shows its influence: cell (i, j) is |dy_i / dx_j|, the norm of the derivative of output i by
input j, of a module with 32 tokens, 8 channels and 2 heads. Every row is divided by its largest value, and roots are
shown, so that small influences are seen too. Matrices are random and larger than at the start of training, so that
attention is not flat.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from panels import Cells, Panel, draw
from torch import Tensor

from subquad.mixers import Mixer, available, build, mixer_class

TIME, DIM, HEADS, GAIN = 32, 8, 2, 2.0
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "dynamicconv": {"kernel_size": 7},
    "eva": {"window": 8, "landmarks": 4},
    "lara": {"landmarks": 4},
    "lightconv": {"kernel_size": 7},
    "linformer": {"proj_k": 4, "max_length": TIME},
    "local": {"window": 8},
    "performer": {"features": 64},
    "primal": {"rank": 4, "rank_multiple": 2},
    "ra": {"proposal": "mean"},
    "scatterbrain": {"window": 8, "features": 16},
}
CAUSAL_OPTIONS: Mapping[str, Mapping[str, Any]] = {**OPTIONS, "eva": {"window": 8, "chunk_size": 4}}


def tokens(time: int = TIME, dim: int = DIM) -> Tensor:
    return torch.randn(1, time, dim, generator=torch.Generator().manual_seed(0))


def built(name: str, **options: Any) -> Mixer:
    torch.manual_seed(0)
    mixer = build(name, **options).eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.dim() > 1:
                parameter.copy_(GAIN * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    return mixer


def influence(mixer: Mixer) -> Cells:
    """(time, time): the root of |dy_i / dx_j|, every row between 0 and 1."""
    derivative = torch.autograd.functional.jacobian(lambda x: mixer(x).y[0], tokens())
    norms = derivative.squeeze(2).square().sum((1, 3)).sqrt()
    return (norms / norms.amax(1, keepdim=True)).sqrt().tolist()


def influence_figure(name: str) -> str:
    shown = {}
    if mixer_class(name).capabilities.bidirectional:
        shown["bidirectional"] = built(name, dim=DIM, heads=HEADS, **OPTIONS.get(name, {}))
    if mixer_class(name).capabilities.causal:
        shown["causal"] = built(name, dim=DIM, heads=HEADS, causal=True, **CAUSAL_OPTIONS.get(name, {}))
    panels = [Panel(title, influence(mixer), "input position", "output position") for title, mixer in shown.items()]
    return draw(panels, f"{name}: how much every output position depends on every input position")


def impulse(heads: int) -> Cells:
    """(channels, time): what bare lightconv makes of a one at position 8 of every channel; the largest is 1."""
    conv = built("lightconv", dim=8, heads=heads, kernel_size=7, projected=False, glu=False)
    x = torch.zeros(1, 17, 8)
    x[:, 8] = 1.0
    with torch.no_grad():
        y = conv(x).y[0].T
    return (y / y.max()).tolist()


def sharing_figure() -> str:
    panels = [
        Panel("depthwise: 8 filters", impulse(heads=8), "position", "channel", cell=14),
        Panel("shared by 2 heads: 2 filters", impulse(heads=2), "position", "channel", cell=14),
    ]
    return draw(panels, "lightconv: the answer of 8 channels to an impulse at position 8")


def taps_figure() -> str:
    """dynamicconv's filters at every position, for two heads: (taps, positions)."""
    mixer = built("dynamicconv", dim=DIM, heads=HEADS, kernel_size=7, projected=False, glu=False)
    with torch.no_grad():
        nowhere = torch.zeros(1, dtype=torch.int64)
        taps = mixer.taps(tokens(), nowhere, nowhere + TIME)[0]
    panels = [Panel(f"head {h}", taps[:, h].T.tolist(), "position", "tap", cell=10) for h in range(HEADS)]
    return draw(panels, "dynamicconv: the filter that every position predicts")


def figures() -> dict[str, str]:
    """SVG texts by the name of their file."""
    drawn = {f"{name}.svg": influence_figure(name) for name in available()}
    return {**drawn, "lightconv-sharing.svg": sharing_figure(), "dynamicconv-taps.svg": taps_figure()}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "mechanisms"
    for name, text in figures().items():
        (folder / name).write_text(text)
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    main()
