"""Speed and memory of the models of the linearising study by length, with attention and with mixers side by side.

    python -m benchmarks.linearise_times --json docs/linearise_times.json --write-docs docs/guides/linearise.md

The models have the sizes of the study and random weights: times do not depend on them. It takes a few minutes, and its
numbers mean something on a machine that does nothing else. Decoding writes one text.
"""

import argparse
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.linearise import BEGIN, END, IMAGE_CASES, TEXT_CASES
from benchmarks.linearise_teachers import LLAMA, VIT, VOCABULARY
from subquad.compare.report.formatting import format_bytes
from subquad.linearise.measure import AFTER, BEFORE, measure_decoding, measure_lengths, random_text
from subquad.linearise.options import parse_mixer
from subquad.linearise.stages.batches import Batch
from subquad.linearise.stages.layers import AttentionLayers
from subquad.nn.stack import MixerChoice
from subquad.packages import require_torchvision
from tools.markdown import fill_between, markdown_table

LENGTHS, POSITIONS = (1024, 4096, 8192), (1024, 4096, 8000)
IMAGES = 32
"""A batch of the ViT, which has 65 tokens for each image."""
COMMAND = "python -m benchmarks.linearise_times"


def measure(lengths: tuple[int, ...] = LENGTHS, positions: tuple[int, ...] = POSITIONS) -> dict[str, Any]:
    """Returns rows of costs by length and of decoding by position, for every mechanism of the study."""
    require_torchvision()
    import transformers

    torch.manual_seed(0)
    llama: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **LLAMA))
    vit: nn.Module = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    pixels = torch.randn(IMAGES, VIT["num_channels"], VIT["image_size"], VIT["image_size"])
    images = Batch({"pixel_values": pixels}, torch.zeros(IMAGES, dtype=torch.long))
    texts = {length: random_text(llama, length) for length in lengths}
    found: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    found |= {"text": [], "images": [], "decoding": []}
    for mixer in dict.fromkeys(case["mixer"] for case in TEXT_CASES.values()):
        layers = _layers(llama, mixer)
        found["text"] += _named(mixer, measure_lengths(llama, layers, texts, print))
        found["decoding"] += _named(mixer, measure_decoding(llama, layers, positions, print))
    for mixer in dict.fromkeys(case["mixer"] for case in IMAGE_CASES.values()):
        layers = _layers(vit, mixer)
        found["images"] += _named(mixer, measure_lengths(vit, layers, {65: images}, print))
    return found


def _layers(model: nn.Module, mixer: str) -> AttentionLayers:
    torch.manual_seed(1)
    return AttentionLayers(model, MixerChoice.model_validate(parse_mixer(mixer)))


def _named(mixer: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"mixer": mixer, **row} for row in rows]


def tables(found: Mapping[str, Any]) -> str:
    """Returns the part of the guide: what was measured where, costs by length, and decoding by position."""
    lines = [f"One sequence (ViT: {IMAGES} images), {found['threads']} threads, float32; medians of rounds.", ""]
    heads = ["", "tokens", "forward with attention", "with mixers", "training with attention", "with mixers"]
    heads += ["memory of training with attention", "with mixers"]
    rows = [_costs(*pair) for part in ("text", "images") for pair in _pairs(found[part])]
    lines += [markdown_table(heads, rows)]
    heads = ["", "after tokens", "tokens a second with attention", "with mixers", "state of attention", "of mixers"]
    lines += [markdown_table(heads, [_decoding(*pair) for pair in _pairs(found["decoding"])])]
    return "\n".join(lines)


def _pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of attention, each with that of the mixers at the same place."""
    places: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        places.setdefault((row["mixer"], row["length" if "length" in row else "position"]), {})[row["variant"]] = row
    return [(both[BEFORE], both[AFTER]) for both in places.values()]


def _costs(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    cells = [after["mixer"], f"{before['length']:,}"]
    for key, show in (("inference_ms", _ms), ("training_ms", _ms), ("training_bytes", format_bytes)):
        cells += [show(row[key]) if row["status"] == "done" else row["reason"] for row in (before, after)]
    return cells


def _ms(timing: Mapping[str, float]) -> str:
    return f"{timing['median']:.1f} ms"


def _decoding(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    cells = [after["mixer"], f"{before['position']:,}"]
    for key, show in (("tokens_per_second", "{:.0f}".format), ("state_bytes", format_bytes)):
        cells += [show(row[key]) if row["status"] == "done" else row["reason"] for row in (before, after)]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--write-docs", type=Path, help="the page whose generated part is filled")
    options = parser.parse_args()
    found = measure()
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.write_docs is not None:
        begin, end = BEGIN.format(name="times", command=COMMAND), END.format(name="times")
        page = options.write_docs.read_text()
        options.write_docs.write_text(fill_between(page, begin, end, tables(found), options.write_docs.name))
    print(tables(found))


if __name__ == "__main__":
    main()
