"""What an update and a decoded token may cost a GPU, counted on the emulated one: these tests fail when it is more.

Synchronisations keep a GPU idle: an update may wait once, after its backward pass. Launches are those of a model with
one layer of each mechanism. A change that needs fewer lowers the numbers below; none may raise them without a reason.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.emulated_gpu import memory
from tests.emulated_gpu.counts import Counts, counted, record
from tests.emulated_gpu.programs import needs_emulated_gpu, run_tests_on_emulated_gpu
from tests.gpu import recipes

pytestmark = needs_emulated_gpu

UPDATE, BACKWARD = "update", "backward"
FEW, MANY = 4, 12
"""Tokens to decode: what differs is the cost of those between."""
SYNCHRONISATIONS_PER_TOKEN = 0.25
COPIED_BYTES_PER_UPDATE = 3200
"""The batch, 128 tokens with their targets, and the sums that the update reads."""
COPIED_BYTES_PER_TOKEN = {"sample": 32, "search": 72}
"""Two rows, or two with two hypotheses each, have a token and a log-probability of eight bytes; and what has ended."""


class TokenBudget(NamedTuple):
    """Of a decoded token. peak_bytes: by which the most that is held grows."""

    launches: int
    peak_bytes: int


class Budget(NamedTuple):
    """launches, peak_bytes: of an update in bfloat16, with all that is held: weights, the optimiser's state, gradients
    and what the backward pass needs. Mechanisms that decode nothing are those of masked language models.
    """

    options: dict[str, Any]
    launches: int
    peak_bytes: int
    sample: TokenBudget | None = None
    search: TokenBudget | None = None


BUDGETS = {
    "softmax": Budget({}, 126, 160 << 10, TokenBudget(56, 256), TokenBudget(91, 0)),
    "lightconv": Budget({"kernel_size": 3}, 103, 125 << 10, TokenBudget(44, 0), TokenBudget(78, 0)),
    "dynamicconv": Budget({"kernel_size": 3}, 111, 132 << 10, TokenBudget(45, 0), TokenBudget(79, 0)),
    "local": Budget({"window": 4}, 96, 128 << 10, TokenBudget(62, 0), TokenBudget(97, 0)),
    "eva": Budget({"window": 4}, 139, 158 << 10, TokenBudget(125, 256), TokenBudget(163, 0)),
    "performer": Budget({"features": 8}, 103, 136 << 10, TokenBudget(89, 0), TokenBudget(126, 0)),
    "primal": Budget({"rank": 4}, 131, 136 << 10, TokenBudget(53, 0), TokenBudget(88, 0)),
    "lara": Budget({"landmarks": 4}, 182, 151 << 10),
    "linformer": Budget({"proj_k": 4, "max_length": 16}, 198, 150 << 10),
    "ra": Budget({}, 164, 179 << 10),
    "scatterbrain": Budget({"window": 4, "features": 8}, 285, 317 << 10),
}


@pytest.mark.nightly
def test_budgets_of_every_mechanism() -> None:
    """test_gpu_tests.py has softmax in the suite."""
    run_tests_on_emulated_gpu(__file__, "-k", "check_")


def test_every_mechanism_has_a_budget() -> None:
    from subquad.mixers import available

    assert set(BUDGETS) == set(available())


# ---------------------------------------------------------------------- on the device


@pytest.fixture(params=[pytest.param(name, marks=() if name == "softmax" else pytest.mark.nightly) for name in BUDGETS])
def mixer(request: pytest.FixtureRequest) -> str:
    return request.param


def train(folder: Path, mixer: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counts, int]:
    """A small language model that was trained, the events of its third update, and the most bytes held in it."""
    from subquad import api
    from subquad.train.updater import Updater

    peaks = []

    def marked(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if kind == UPDATE:
                peaks.append(memory.peak)
                memory.reset_peak()
            record(kind, kind)
            return function(*args, **options)

        return call

    budget = BUDGETS[mixer]
    task = "masked-language-model" if budget.search is None else "language-model"
    chosen = {"name": mixer, **budget.options}
    recipe = recipes.language_model(folder, chosen, task, precision="bfloat16", validate_every=4)
    with monkeypatch.context() as patch, counted() as counts:
        patch.setattr(Updater, "step", marked(UPDATE, Updater.step))
        patch.setattr(torch.autograd, "backward", marked(BACKWARD, torch.autograd.backward))
        run = api.train(recipes.write(folder, recipe), out=folder / "run")
    starts = [place for place, event in enumerate(counts.events) if event.kind == UPDATE]
    assert len(starts) == 4
    update = Counts()
    update.events = counts.events[starts[2] : starts[3]]
    assert update.count(BACKWARD) == 1
    return run, update, peaks[3]


@pytest.fixture(autouse=True)
def _collect_garbage_as_programs_do() -> Iterator[None]:
    """Tensors in cycles of objects count as memory until they are collected; the suite does that less often."""
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*usual)


def check_an_update(mixer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BUDGETS[mixer]
    run, update, peak_bytes = train(tmp_path, mixer, monkeypatch)
    assert update.before(BACKWARD).synchronisations == 0, update.report()
    assert update.synchronisations <= 1, update.report()
    assert update.copied_bytes <= COPIED_BYTES_PER_UPDATE, update.report()
    assert update.launches <= budget.launches, update.report()
    assert peak_bytes <= budget.peak_bytes
    for how, allowed in (("sample", budget.sample), ("search", budget.search)):
        if allowed is not None:
            assert_tokens_cost(run, how, allowed)


def assert_tokens_cost(run: Any, how: str, allowed: TokenBudget) -> None:
    (few, few_bytes), (many, many_bytes) = (decode(run, how, tokens) for tokens in (FEW, MANY))
    tokens = MANY - FEW
    assert many.synchronisations - few.synchronisations <= SYNCHRONISATIONS_PER_TOKEN * tokens, many.report()
    assert many.copied_bytes - few.copied_bytes <= COPIED_BYTES_PER_TOKEN[how] * tokens, many.report()
    assert many.launches - few.launches <= allowed.launches * tokens, many.report()
    assert many_bytes - few_bytes <= allowed.peak_bytes * tokens


def decode(run: Any, how: str, tokens: int) -> tuple[Counts, int]:
    """The events of as many tokens after two prompts, which the model cannot end before, and the most bytes held."""
    from subquad.decode.options import SampleOptions

    generator = run.generator(beam=2, min_len=tokens)
    memory.reset_peak()
    with counted() as counts:
        if how == "sample":
            generator.special = generator.special._replace(eos=-1)
            generator.sample(["the", "a cat"], tokens, SampleOptions())
        else:
            generator.search(["the", "a cat"], tokens)
    return counts, memory.peak
