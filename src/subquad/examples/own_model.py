"""A language model of characters in plain torch, with any causal mechanism of subquad in it.

    python -m subquad.examples.own_model eva window=16 chunk_size=4
    python -m subquad.examples.own_model lightconv kernel_size=7 --text my.txt --steps 500

It reads a text (its own source by default), trains on random pieces of it, and then writes, one character at a time,
through the mixers' streaming states. The only lines that know subquad are those with `build`, `init_state` and `.y`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from subquad.mixers import State, build

DIM, HEADS, LAYERS, TIME, BATCH = 64, 4, 2, 64, 16


class Block(nn.Module):
    """Mixer and feed-forward map, each after a norm and beside a residual path."""

    def __init__(self, mixer: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.mixer = build(mixer, dim=DIM, heads=HEADS, causal=True, **options)
        self.before_mixer, self.before_feed = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.feed = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        mixed = self.mixer(self.before_mixer(x), state=state)
        x = x + mixed.y
        return x + self.feed(self.before_feed(x)), mixed.state


class CharacterModel(nn.Module):
    """(batch, time) int64 -> logits (batch, time, characters)."""

    def __init__(self, characters: int, mixer: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, DIM)
        self.blocks = nn.ModuleList([Block(mixer, options) for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)

    @torch.inference_mode()
    def write(self, token: Tensor, count: int) -> list[int]:
        """The likeliest `count` characters after `token` (1, 1), in constant time each for most mechanisms."""
        states = [block.mixer.init_state(batch=1) for block in self.blocks]  # type: ignore[union-attr, operator]
        written = []
        for _ in range(count):
            x = self.embedding(token)
            for number, block in enumerate(self.blocks):
                x, states[number] = block(x, states[number])
            token = self.head(x).argmax(-1)
            written.append(int(token))
        return written


def train(model: CharacterModel, text: Tensor, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - TIME, (BATCH,)).tolist()
        pieces = torch.stack([text[start : start + TIME + 1] for start in starts])
        loss = F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}")


def options_of(words: list[str]) -> dict[str, Any]:
    """["window=4", "overlap=true"] -> {"window": 4, "overlap": True}."""
    return {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixer", help="a causal mechanism, see `subquad info`")
    parser.add_argument("options", nargs="*", metavar="option=value", help="its options")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn (default: this file)")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    text = given.text.read_text()
    if len(text) <= TIME + 1:
        raise ValueError(f"{given.text} has {len(text)} characters; more than {TIME + 1} are needed")
    characters = sorted(set(text))
    torch.manual_seed(0)
    model = CharacterModel(len(characters), given.mixer, options_of(given.options))
    numbers = torch.tensor([characters.index(character) for character in text])
    train(model, numbers, given.steps)
    written = model.eval().write(numbers[:1, None], 200)
    print("".join(characters[number] for number in written))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"own_model: {error}")
