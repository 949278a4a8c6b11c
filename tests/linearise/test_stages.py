"""The stages of linearising: they resume bit by bit, keep the layers that cost most, and merge what LoRA learned."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad.interop.patching.host import SwappedAttention
from subquad.linearise.options import parse_mixer
from subquad.linearise.stages.batches import Batch, Batches
from subquad.linearise.stages.finetune import choose_parameters, linear_maps, merge
from subquad.linearise.stages.hybrid import most_costly
from subquad.linearise.stages.layers import AttentionLayers
from subquad.linearise.stages.objective import evaluate, logits_of
from subquad.linearise.stages.stage import Stage
from subquad.nn.stack import MixerChoice
from subquad.processes import StopRequest
from subquad.testing import close
from tests.linearise.hosts import HOSTS, data_for, stages_for

FORMS: dict[str, dict[str, Any]] = {
    "gpt2": {"mixer": "eva=window=4", "distill": 1.0},
    "llama": {"mixer": "performer", "tune": "lora", "distill": 1.0, "keep": 1},
    "bert": {"mixer": "lara=landmarks=4", "tune": "lora"},
    "bert classifier": {"mixer": "local=window=4"},
    "vit": {"mixer": "softmax,performer"},
    "timm vit": {"mixer": "local=window=2", "distill": 0.5},
}


class InterruptedBatches:
    """Batches that somebody presses Ctrl-C at."""

    def __init__(self, batches: Batches, at: int, stop: StopRequest) -> None:
        """at: the number of the update, counted over all stages."""
        self.batches, self.at, self.stop = batches, at, stop

    def __getitem__(self, update: int) -> Batch:
        if update == self.at:
            self.stop.receive(signal.SIGINT, None)
        return self.batches[update]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("host", FORMS)
def test_what_was_interrupted_twice_is_what_was_not_interrupted(host: str, tmp_path: Path) -> None:
    whole = stages_for(host, tmp_path / "whole", **FORMS[host])
    expected = weights(whole.run())
    for at, kept in ((0, "transfer: update 1"), (4, "finetune: update 2")):
        stop = StopRequest()
        stages = stages_for(host, tmp_path / "parts", stop=stop, **FORMS[host])
        stages.batches = InterruptedBatches(stages.batches, at, stop)
        with pytest.raises(KeyboardInterrupt, match=f"{kept} is kept, and the same command goes on"):
            stages.run()
    resumed = stages_for(host, tmp_path / "parts", **FORMS[host])
    found = weights(resumed.run())
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert resumed.scores.keys() == whole.scores.keys()
    for name, score in whole.scores.items():
        assert score.to_json() == resumed.scores[name].to_json()


@pytest.mark.parametrize("host", FORMS)
def test_the_result_has_mixers_where_they_belong_and_no_trace_of_training(host: str, tmp_path: Path) -> None:
    stages = stages_for(host, tmp_path / "out", **FORMS[host])
    model = stages.run()
    assert type(model) is type(HOSTS[host]())
    found = [module.mixer.name for module in model.modules() if isinstance(module, SwappedAttention)]
    assert found == [name for name in stages.layers.mechanisms() if name != "softmax"]
    assert not any("lora" in name for name in model.state_dict())
    assert all(p.requires_grad for p in model.parameters())
    last = list(stages.scores.values())[-1]
    assert evaluate(model, stages.valid, 4).to_json() == last.to_json()


def test_a_transfer_that_makes_a_layer_worse_is_not_used(tmp_path: Path) -> None:
    """So large a learning rate spoils every layer: after the transfer the model is what the bare swap made of it."""
    stages = stages_for("gpt2", tmp_path / "out", transfer_lr=1e3, tune="none")
    stages.run()
    assert all(after > before for before, after in stages.transfer_errors.values())
    assert stages.scores["transfer"].to_json() == stages.scores["swapped"].to_json()


def test_layers_that_cost_most_keep_their_attention(tmp_path: Path) -> None:
    stages = stages_for("llama", tmp_path / "out", "identity", keep=1, transfer_updates=0, tune="none")
    stages.run()
    losses = {}
    for number in (0, 1):
        alone = stages_for("llama", tmp_path / str(number), "identity", transfer_updates=0, tune="none")
        alone.layers = AttentionLayers(alone.model, alone.options.mixer)
        with alone.layers.replaced([number]):
            losses[number] = evaluate(alone.model, alone.data.train, 4).loss().value
    assert stages.layer_losses == losses
    (kept,) = stages.kept
    assert losses[kept] == max(losses.values())
    assert stages.layers.mechanisms()[kept] == "softmax"


def test_choices_of_layers_are_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one of 2 layers"):
        stages_for("gpt2", tmp_path / "a", keep=2).run()
    with pytest.raises(ValueError, match="softmax is what the model has"):
        stages_for("gpt2", tmp_path / "b", "softmax").run()
    with pytest.raises(ValueError, match="replaces no layer"):
        stages_for("gpt2", tmp_path / "c", "softmax,softmax").run()
    with pytest.raises(ValueError, match="has 3 layers; the stack has 2"):
        stages_for("gpt2", tmp_path / "d", "eva,eva,eva").run()
    assert most_costly({0: 1.0, 1: 3.0, 2: 3.0, 3: 2.0}, 2) == [1, 2]


@pytest.mark.parametrize("host", ["gpt2", "llama", "bert"])
def test_lora_begins_with_the_same_model_trains_nothing_else_and_merges_exactly(host: str) -> None:
    model = HOSTS[host]()
    layers = AttentionLayers(model, MixerChoice.model_validate(parse_mixer("local=window=4")))
    layers.install()
    batch = data_for(host).train.batch(range(4), 0)
    before, names = logits_of(model, batch).detach(), set(linear_maps(model, layers.mixers))
    assert names
    assert not any("mixer" in name or "lm_head" in name for name in names)
    trained = choose_parameters(model, "lora", 2, layers.mixers)
    assert close(logits_of(trained, batch), before)
    chosen = [name for name, p in trained.named_parameters() if p.requires_grad]
    assert all("lora_" in name or "mixer" in name for name in chosen)
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if "lora_B" in name:
                p.normal_()
    after = logits_of(trained.eval(), batch).detach()
    assert not close(after, before)
    merged = merge(trained)
    assert close(logits_of(merged, batch), after, 1e-4)
    assert merged.state_dict().keys() == before_keys(host)


def before_keys(host: str) -> Any:
    model = HOSTS[host]()
    AttentionLayers(model, MixerChoice.model_validate(parse_mixer("local=window=4"))).install()
    return model.state_dict().keys()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    stages_for("gpt2", tmp_path / "out", tune="none").run()
    other = stages_for("gpt2", tmp_path / "out", "eva=window=4", tune="none")
    with pytest.raises(ValueError, match="is of another model"):
        other.run()


def test_a_gradient_that_is_not_finite_ends_a_stage_before_the_update(tmp_path: Path) -> None:
    stages = stages_for("gpt2", tmp_path / "out")
    model = stages.model

    def explode(_: Any) -> dict[str, float]:
        next(model.parameters()).grad = torch.full_like(next(model.parameters()), float("inf"))
        return {"loss": 0.0}

    before = weights(model)
    with pytest.raises(ValueError, match="update 1: the gradient is not finite"):
        Stage(stages.plan("finetune"), model, explode, tmp_path / "stage").fit(
            stages.batches, StopRequest(), stages.progress
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
