"""Part `step`: training steps of the Multi30k recipes, as a share of the machine's peak, and where their time goes.

The peak is the best square product of matrices in float32, timed in turns with the step. The operations of a step are
those of its matrix products, forward and backward, as torch counts them with plain kernels; random tokens stand for the
text, as many as the recipe's batches have.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measured import Effort, Result, milliseconds, side_by_side
from subquad.compare.measure.checks import CheckFailedError
from subquad.compare.measure.timing import Work
from subquad.kernels import dispatch
from subquad.models.seeded import build_seeded
from subquad.tasks.translation import TranslationTask
from subquad.train.distributed import DistributedLoss
from subquad.train.recipe import read_recipe
from subquad.train.updater import Updater

TITLES = {
    "step-peak": "operations of a training step's matrix products a second, over those of the best square product",
    "step-profile": "share of the time of a training step",
}
RECIPES = ("multi30k_lightconv", "multi30k_softmax")
SENTENCES, LENGTH = 292, 14
"""About the 4,096 tokens of the recipe's batches, of the length of most sentences."""
SQUARES = (1024, 2048)
"""Sizes of the square products."""
LEAST_SHARE = 0.72
PROFILED = 5
KINDS = {
    "matrix products": r"aten::(mm|addmm|addmm_|bmm|baddbmm)$",
    "loss over words": r"_LinearLoss|cross_entropy|log_softmax",
    "mixing": r"tap_conv|scaled_dot_product|aten::(_softmax|glu|glu_backward|sigmoid)",
    "layer norm": r"layer_norm",
    "dropout": r"_Dropout",
    "embedding": r"embedding",
    "optimiser": r"_fused_adam|Optimizer|_foreach",
    "activations, sums and copies": r"aten::(add|mul|clamp_min|threshold_backward|sum|copy|cat|fill|zero)_?$",
}
REST = "everything else, Python's calls included"


def training_step(effort: Effort, say: Callable[[str], None]) -> Iterator[Result]:
    squares = {f"{size} x {size}": square_product(size) for size in ((64,) if effort.quick else SQUARES)}
    for name in RECIPES:
        say(f"a training step of {name}")
        step, flops = build_step(name, *((4, 5) if effort.quick else (SENTENCES, LENGTH)))
        seconds = side_by_side({"step": step, **squares}, effort)
        peak = max(2 * int(size.split()[0]) ** 3 / seconds[size]["median"] for size in squares)
        numbers = {**milliseconds(seconds), "GFLOP": flops / 1e9, "peak GFLOP/s": peak / 1e9}
        share = flops / seconds["step"]["median"] / peak
        yield Result("step-peak", {"recipe": name}, numbers, share, ("at least", LEAST_SHARE), seconds=seconds)
        yield from profile_step(name, step)


def square_product(size: int) -> Work:
    left, right = torch.randn(size, size), torch.randn(size, size)
    return lambda: {"product": left @ right}


def build_step(name: str, sentences: int, length: int) -> tuple[Work, int]:
    """A training step of the recipe on one random batch, and the operations of its matrix products."""
    recipe = read_recipe(name)
    model = build_seeded(recipe.model_data({}), 0).train()
    batch = TranslationTask.random_batch(model, sentences, length, torch.Generator().manual_seed(0))
    loss = DistributedLoss(
        model, lambda model, batch: TranslationTask.model_loss(model, batch, 1, recipe.train.smoothing)[0]
    )
    updater = Updater(loss, recipe.optim, torch.device("cpu"))
    failures = Path(tempfile.gettempdir()) / "failure"

    def step() -> dict[str, torch.Tensor]:
        found = updater.step([batch], recipe.schedule.lr, failures)
        return {"loss": torch.tensor(found.loss)}

    with plain_kernels(), FlopCounterMode(display=False) as counter:
        loss(batch).total.backward()
    if not step()["loss"].isfinite():
        raise CheckFailedError(f"the loss of {name} is not finite")
    return step, counter.get_total_flops()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Within it every operation is plain torch, whose products are counted."""
    before = os.environ.get(dispatch.VARIABLE)
    os.environ[dispatch.VARIABLE] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ[dispatch.VARIABLE]
        else:
            os.environ[dispatch.VARIABLE] = before


def profile_step(name: str, step: Work) -> Iterator[Result]:
    """Of the time that the profiler saw in each kind of operation, without those that it called."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            step()
    times = dict.fromkeys((*KINDS, REST), 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.key)), REST)
        times[kind] += event.self_cpu_time_total / 1e3 / PROFILED
    for kind, spent in sorted(times.items(), key=lambda item: -item[1]):
        yield Result("step-profile", {"recipe": name, "in": kind}, {"ms": spent}, spent / sum(times.values()))
