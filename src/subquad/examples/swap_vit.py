"""Swaps the attention of a trained timm ViT: what quality it loses at once, and what fine-tuning brings back.

    python -m subquad.examples.swap_vit
    python -m subquad.examples.swap_vit --mixers local,eva,primal --tune-epochs 20
    python -m subquad.examples.swap_vit performer features=32

A small vision transformer learns scikit-learn's handwritten digits with softmax attention. Then each mechanism takes
the place of its attention, with the trained weights where it has them, and the whole model is trained a little more:

    lost = trained - swapped in        regained = fine-tuned - swapped in

The last line is the control: the same extra training without a swap. Needs `pip install timm 'subquad[demo,vision]'`.
"""

import argparse
import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import subquad
from subquad.data.builtin import load
from subquad.data.images.arrays import ArrayImages
from subquad.evaluate.accuracy import class_ranks
from subquad.mixers import build
from subquad.packages import require, require_torchvision

BATCH, WIDTH, HEADS = 64, 32, 4
FITTING: dict[str, dict[str, Any]] = {
    "dynamicconv": {"kernel_size": 7},
    "eva": {"window": 2, "landmarks": 4},
    "lara": {"landmarks": 4},
    "lightconv": {"kernel_size": 7},
    "linformer": {"proj_k": 8},
    "local": {"window": 2},
    "scatterbrain": {"window": 2},
}
"""Options for 4 × 4 tokens, which most defaults would see all at once."""
COLUMNS = ("swapped in", "lost", "fine-tuned", "regained")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixer", nargs="?", help="one mechanism, with options of its own, instead of --mixers")
    parser.add_argument("options", nargs="*", metavar="option=value", help="options of the mechanism")
    parser.add_argument(
        "--mixers",
        default="local,performer,lightconv",
        help="mechanisms that take the place of attention in turn, see `subquad info` (default: %(default)s)",
    )
    parser.add_argument("--epochs", type=int, default=30, help="training with softmax attention (default: 30)")
    parser.add_argument("--tune-epochs", type=int, default=10, help="training after the swap (default: 10)")
    parser.add_argument("--class-token", action="store_true", help="classify by a token of its own, not by the mean")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def options_of(words: list[str]) -> dict[str, Any]:
    """["window=4", "overlap=true"] -> {"window": 4, "overlap": True}."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word!r} is no option; write option=value")
    return {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}


def vision_transformer(class_token: bool) -> nn.Module:
    """Tokens are the 4 × 4 patches of 2 × 2 pixels."""
    require_torchvision()  # timm imports it, also where it was built for another torch
    timm = require("timm.models.vision_transformer", "this example")
    pool = "token" if class_token else "avg"
    size = {"embed_dim": WIDTH, "depth": 2, "num_heads": HEADS, "mlp_ratio": 2}
    return timm.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, class_token=class_token, global_pool=pool, **size
    )


def tensors(part: ArrayImages) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(part.images), torch.from_numpy(part.labels)


def train(model: nn.Module, part: ArrayImages, epochs: int, rate: float) -> None:
    images, labels = tensors(part)
    steps = epochs * -(-len(images) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps + 1, pct_start=0.1)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimiser.step()
            schedule.step()


@torch.inference_mode()
def top1(model: nn.Module, part: ArrayImages) -> float:
    images, labels = tensors(part)
    return round(float((class_ranks(model.eval()(images), labels) == 0).float().mean()), 3)  # as it is shown


def main() -> None:
    given = arguments()
    tried = {name: FITTING.get(name, {}) for name in given.mixers.split(",")}
    if given.mixer is not None:
        tried = {given.mixer: options_of(given.options)}
    for mixer, options in tried.items():
        build(mixer, dim=WIDTH, heads=HEADS, **options)  # mistakes are refused before the training
    digits = load("digits")
    torch.manual_seed(given.seed)
    trained = vision_transformer(given.class_token)
    train(trained, digits.train, given.epochs, 3e-3)
    before = top1(trained, digits.test)
    results = {}
    for mixer, options in [*tried.items(), (None, {})]:
        torch.manual_seed(given.seed)  # whatever else is tried
        model = copy.deepcopy(trained)
        if mixer is not None:
            print(subquad.swap(model, mixer, **options), end="\n\n")
        swapped = top1(model, digits.test)
        train(model, digits.train, given.tune_epochs, 1e-3)
        tuned = top1(model, digits.test)
        words = [mixer or "softmax, not swapped", *(f"{name}={value}" for name, value in options.items())]
        results[" ".join(words)] = (swapped, before - swapped, tuned, tuned - swapped)
    print(f"top-1 on the test images; softmax, trained: {before:.3f}")
    width = max(map(len, results))
    print(" " * width, *(column.rjust(10) for column in COLUMNS))
    for what, shares in results.items():
        print(what.ljust(width), *(f"{share:10.3f}" for share in shares))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"swap_vit: {error}")
