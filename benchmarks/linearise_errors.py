"""How far mechanisms are from the attention of a teacher before they learn anything, layer by layer.

    python -m benchmarks.linearise_errors study/images-teacher-1 --data digits
    python -m benchmarks.linearise_errors study/text-teacher --data WIKITEXT2/train.txt.gz

The error is that of attention transfer, |mixer - attention|^2 / |attention|^2 of the layers' outputs on training
samples, as the mean over seeds: 1 is that of a mixer that returns zeros. The last lines describe the attention. Its
largest weight, as the mean over queries and heads: the sharper attention is, the more features its kernel takes. And
the mean of |t|^2 / (2 sqrt(d)) of queries and keys: performer's features are exp(-this) times a number below 1, beside
which stands its constant 1e-4, so that beyond 9 the constant is all that is left.
"""

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from subquad.kernels.feature_attention import feature_attention
from subquad.kernels.feature_attention.reference import feature_scores
from subquad.linearise.models import load_source
from subquad.linearise.options import parse_mixer
from subquad.linearise.stages.batches import thin_out
from subquad.linearise.stages.data import read_data
from subquad.linearise.stages.layers import AttentionLayers
from subquad.linearise.stages.objective import logits_of
from subquad.linearise.stages.transfer import AttentionTransfer
from subquad.mixers import performer
from subquad.nn.stack import MixerChoice
from tools.markdown import markdown_table

MIXERS = (
    *(f"performer=features={features}" for features in (16, 64, 256, 1024)),
    *(f"performer=features={features},smallest_normaliser=1.0e-6" for features in (16, 64, 256, 1024)),
    *(f"performer=feature_map={name}" for name in ("relu", "fourier")),
    *(f"local=window={window}" for window in (16, 64)),
    "eva=window=16",
    "identity",
)
SEEDS = (1, 2, 3)
LENGTH, BATCH = 1024, 4


def errors(model: Any, mixer: str, samples: Any) -> list[float]:
    """Returns the error of every layer, as the mean over seeds."""
    rows = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        layers = AttentionLayers(model, MixerChoice.model_validate(parse_mixer(mixer)))
        rows.append(list(AttentionTransfer(model, layers).errors(samples, BATCH).values()))
    return torch.tensor(rows).mean(0).tolist()


def exponents(model: Any, samples: Any) -> list[float]:
    """Returns the mean of |t|^2 / (2 sqrt(d)) over queries and keys of every layer."""
    found: list[float] = []

    def see(qkv: torch.Tensor, matrix: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found.append(float(feature_scores(qkv, matrix).c.mean()))
        return feature_attention(qkv, matrix, *rest, **options)

    layers = AttentionLayers(model, MixerChoice(name="performer"))
    with patch.object(performer, "feature_attention", see):
        AttentionTransfer(model, layers).errors(samples, len(samples))
    return found


def largest_weights(folder: Path, batch: Any) -> list[float]:
    """Returns the largest weight of attention of every layer, as the mean over samples, heads and queries."""
    model: Any = load_source(folder).model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**batch.inputs, output_attentions=True).attentions
    return [float(weights.amax(-1).mean()) for weights in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="the folder of a model of transformers")
    parser.add_argument("--data", required=True, help="what it was trained on")
    parser.add_argument("--samples", type=int, default=8, help="how many (default: %(default)s)")
    options = parser.parse_args()
    source = load_source(options.teacher)
    model: Any = source.model.eval()
    tools = {"tokenizer": source.tokenizer, "processor": source.processor}
    samples = thin_out(read_data(model, [options.data], length=LENGTH, **tools).train, options.samples)
    batch = samples.batch(range(len(samples)), 0)
    with torch.no_grad():
        logits_of(model, batch)  # refuses wrong data before the work
    rows = [[mixer, *(f"{error:.3f}" for error in errors(model, mixer, samples))] for mixer in MIXERS]
    weights = largest_weights(options.teacher, batch)
    rows.append(["largest weight of attention", *(f"{weight:.3f}" for weight in weights)])
    rows.append(["exponent of queries and keys", *(f"{size:.1f}" for size in exponents(model, samples))])
    print(markdown_table(["", *(f"layer {number}" for number in range(len(rows[0]) - 1))], rows))


if __name__ == "__main__":
    main()
