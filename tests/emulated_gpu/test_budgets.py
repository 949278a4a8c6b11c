"""What an update and a decoded token may cost a GPU, counted on the emulated one: these tests fail when it is more.

Synchronisations keep a GPU idle: an update may wait once, after its backward pass. Launches are those of a model with
one layer of each mechanism. A change that needs fewer lowers the numbers below; none may raise them without a reason.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated_gpu.counts import Counts, counted, record
from tests.emulated_gpu.programs import needs_emulated_gpu, run_tests_on_emulated_gpu
from tests.gpu import recipes

pytestmark = needs_emulated_gpu

UPDATE, BACKWARD = "update", "backward"
FEW, MANY = 4, 12
"""Tokens to decode: what differs is the cost of those between."""
MIXERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "lightconv": {"kernel_size": 3},
    "dynamicconv": {"kernel_size": 3},
    "local": {"window": 4},
    "eva": {"window": 4},
    "performer": {"features": 8},
    "primal": {"rank": 4},
}

LAUNCHES_PER_UPDATE = {
    "softmax": 126, "lightconv": 103, "dynamicconv": 111, "local": 96, "eva": 139, "performer": 103, "primal": 156,
}  # fmt: skip
"""Of forward, backward and optimiser, in bfloat16."""
LAUNCHES_PER_TOKEN = {
    "softmax": (56, 91), "lightconv": (44, 78), "dynamicconv": (45, 79), "local": (62, 97), "eva": (125, 163),
    "performer": (89, 126), "primal": (53, 88),
}  # fmt: skip
"""Sampling, and beam search."""
SYNCHRONISATIONS_PER_TOKEN = 0.25
BYTES_PER_UPDATE = 3200
"""The batch, 128 tokens with their targets, and the sums that the update reads."""
BYTES_PER_TOKEN = 16


@pytest.mark.nightly
def test_budgets_of_every_mechanism() -> None:
    """test_gpu_tests.py has softmax in the suite."""
    run_tests_on_emulated_gpu(__file__, "-k", "check_")


# ---------------------------------------------------------------------- on the device


@pytest.fixture(
    params=["softmax", *(pytest.param(name, marks=pytest.mark.nightly) for name in MIXERS if name != "softmax")]
)
def mixer(request: pytest.FixtureRequest) -> str:
    return request.param


def train(folder: Path, mixer: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counts]:
    """A small language model that was trained, and the events of its third update."""
    from subquad import api
    from subquad.train.updater import Updater

    def marked(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            record(kind, kind)
            return function(*args, **options)

        return call

    recipe = recipes.language_model(folder, {"name": mixer, **MIXERS[mixer]}, precision=precision, validate_every=4)
    with monkeypatch.context() as patch, counted() as counts:
        patch.setattr(Updater, "step", marked(UPDATE, Updater.step))
        patch.setattr(torch.autograd, "backward", marked(BACKWARD, torch.autograd.backward))
        run = api.train(recipes.write(folder, recipe), out=folder / "run")
    starts = [place for place, event in enumerate(counts.events) if event.kind == UPDATE]
    assert len(starts) == 4
    update = Counts()
    update.events = counts.events[starts[2] : starts[3]]
    assert update.count(BACKWARD) == 1
    return run, update


def check_budgets(mixer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, update = train(tmp_path, mixer, "bfloat16", monkeypatch)
    assert update.before(BACKWARD).synchronisations == 0, update.report()
    assert update.synchronisations <= 1, update.report()
    assert update.launches <= LAUNCHES_PER_UPDATE[mixer], update.report()
    assert update.copied_bytes <= BYTES_PER_UPDATE, update.report()
    for how, launches in zip(("sample", "search"), LAUNCHES_PER_TOKEN[mixer], strict=True):
        few, many = (decode(run, how, tokens) for tokens in (FEW, MANY))
        tokens = MANY - FEW
        assert many.launches - few.launches <= launches * tokens, many.report()
        waits = many.synchronisations - few.synchronisations
        assert waits <= SYNCHRONISATIONS_PER_TOKEN * tokens, many.report()
        assert many.copied_bytes - few.copied_bytes <= BYTES_PER_TOKEN * tokens, many.report()


def decode(run: Any, how: str, tokens: int) -> Counts:
    """The events of as many tokens after two prompts, which the model cannot end before."""
    from subquad.decode.options import SampleOptions

    generator = run.generator(beam=2, min_len=tokens)
    with counted() as counts:
        if how == "sample":
            generator.special = generator.special._replace(eos=-1)
            generator.sample(["the", "a cat"], tokens, SampleOptions())
        else:
            generator.search(["the", "a cat"], tokens)
    return counts
