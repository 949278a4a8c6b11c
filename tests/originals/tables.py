"""Fixtures in JSON: numbers that are compared one by one instead of tensors."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad.models import Model, build_model, preset
from subquad.models.costs import forward_flops
from subquad.models.presets import PRESETS
from subquad.nn.positions import build_positions, position_ids
from tests.originals import arguments, batching, text, training
from tests.originals.files import OUTPUT_TOLERANCE, assert_close
from tests.originals.token_bleu import token_bleu

# The settings of the papers; on pyramids LARA's landmarks are mapped over all channels.
MIXERS: dict[str, dict[str, Any]] = {
    "softmax": {"name": "softmax"},
    "performer": {"name": "performer", "features": 64},
    "local": {"name": "local", "window": 7, "relative": "table", "dims": 2},
    "eva": {"name": "eva", "window": 7, "landmarks": 49, "relative": "table", "dims": 2},
    "lara": {"name": "lara", "landmarks": 49, "proposal": "pool", "landmark_mixing": "keys", "alpha": 2.0},
}
PYRAMIDS = {
    "nano": ([32, 64, 160, 256], [2, 2, 2, 2], [8, 8, 4, 4]),
    "tiny": ([64, 128, 320, 512], [2, 2, 2, 2], [8, 8, 4, 4]),
    "small": ([64, 128, 320, 512], [3, 4, 6, 3], [8, 8, 4, 4]),
    "medium": ([64, 128, 320, 512], [3, 4, 18, 3], [8, 8, 4, 4]),
    "base": ([64, 128, 320, 512], [3, 8, 27, 3], [8, 8, 4, 4]),
    "large": ([64, 128, 320, 512], [3, 6, 40, 3], [4, 4, 4, 4]),
}


def vision_model(key: str) -> Model:
    """A model of the efficient-attention library by its name there and its mechanism: `evit_tiny_p8/eva`."""
    name, mechanism = key.split("/")
    if name.startswith("evit_"):
        size, patch = name.rsplit("_p", 1)
        known = name if name in PRESETS else f"{size}_p16"
        return build_model(known, patch_size=int(patch), encoder={"mixer": MIXERS[mechanism]})
    doubled = name.endswith("2")  # such names have twice the heads
    dims, depths, ratios = PYRAMIDS[name.removeprefix("pvt_").removesuffix("2")]
    heads = [number * (2 if doubled else 1) for number in (1, 2, 5, 8)]
    mixer = MIXERS[mechanism] | ({"pool_proj": "dense"} if mechanism == "lara" else {})
    base = preset("pvt_v2_b3")["stages"]
    stages = [
        {
            **base[i],
            "dim": dims[i],
            "layers": depths[i],
            "heads": heads[i],
            "ffn_dim": ratios[i] * dims[i],
            "mixer": mixer,
        }
        for i in range(4)
    ]
    stages[-1]["mixer"] = "softmax"
    return build_model("pyramid", stages=stages)


def check_parameter_counts(content: dict[str, int]) -> None:
    assert content
    for key, count in content.items():
        with torch.device("meta"):
            assert vision_model(key).parameter_count() == count, key


def check_multiplications(content: dict[str, float]) -> None:
    """Billions of multiply-adds an image. LARA's landmarks are products here, which the original pools: more."""
    for key, billions in content.items():
        with torch.device("meta"):
            model = vision_model(key).eval()
            (images,) = model.random_inputs(1, model.native_length or 1)
            ours = forward_flops(partial(model, images)) / 2e9
        if key.endswith("/lara"):
            assert billions <= ours <= 1.1 * billions, key
        else:
            assert abs(ours - billions) <= 1e-9, key


def check_sinusoids(content: dict[str, Any]) -> None:
    """fairseq's table from its first position on, and the rows that tokens get, padding left out."""
    first = content["padding_idx"] + 1
    for dim, table in ((content["dim"], content["table"]), (7, content.get("odd_dim7_table"))):
        if table is not None:
            positions = build_positions("sinusoidal", dim, 1)
            assert positions is not None
            golden = torch.tensor(table)[first:]
            assert_close(positions(torch.arange(len(golden))[None])[0], golden, OUTPUT_TOLERANCE, f"table of {dim}")
    tokens = torch.tensor(content["tokens"])
    padding = tokens == content["padding_idx"]
    positions = build_positions("sinusoidal", content["dim"], 1)
    assert positions is not None
    ours = positions(position_ids(padding, tokens.shape[1], None, tokens.device))
    golden = torch.tensor(content["out"])
    assert_close(ours[~padding], golden[~padding], OUTPUT_TOLERANCE, "positions of tokens")


def check_bleu(content: dict[str, Any]) -> None:
    """fairseq's scorer on token numbers: the score, and the figures of its line."""
    measure = token_bleu(content["hyps"], content["refs"], pad=1, eos=2, unk=3)
    assert abs(measure.value - content["score"]) <= 1e-9
    said, asked, *counts = measure.statistics.sum(0).tolist()
    precisions = "/".join(f"{100 * right / total:.1f}" for right, total in zip(counts[:4], counts[4:], strict=True))
    assert f"{precisions} (BP=" in content["result"]
    assert f"syslen={said:.0f}, reflen={asked:.0f})" in content["result"]


TABLES: dict[str, Callable[[Any], None]] = {
    "efficient-attention/argument_table.json": arguments.check_arguments,
    "efficient-attention/param_counts.json": check_parameter_counts,
    "efficient-attention/gmacs_measured.json": check_multiplications,
    "fairseq/adam.json": training.check_adam,
    "fairseq/average_checkpoints.json": training.check_average,
    "fairseq/batching.json": batching.check_batching,
    "fairseq/bleu.json": check_bleu,
    "fairseq/collate.json": batching.check_collate,
    "fairseq/criterion_label_smoothed.json": training.check_label_smoothing,
    "fairseq/dictionary.json": text.check_dictionary,
    "fairseq/lr_schedules.json": training.check_schedules,
    "fairseq/post_process.json": text.check_post_process,
    "fairseq/sinusoidal.json": check_sinusoids,
}


def check(path: Path, name: str) -> None:
    TABLES[name](json.loads(path.read_text()))
