"""A mechanism that is causal only works wherever a causal one can stand, and is refused aloud elsewhere."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from subquad.cli.main import run
from subquad.compare.measure.bench import BenchPlan, build_or_refuse
from subquad.compare.variants import build_variant
from subquad.mixers import Capabilities, Mixer, MixerConfig, build, registry
from subquad.models import build_model
from subquad.train.recipe import read_recipe

ROOT = Path(__file__).parents[2]


class RunningSum(Mixer):
    """Running sum: every token becomes the sum of the tokens up to it, mapped.

    Equation:
        y_t = W (x_1 + ... + x_t)
    """

    capabilities = Capabilities(causal=True, cross=False, grid=False, state="none", bidirectional=False)

    def setup(self) -> None:
        self.out = nn.Linear(self.config.dim, self.config.dim)

    def mix(self, x, layout):
        return self.out(x.cumsum(1)), None


@pytest.fixture(autouse=True)
def running_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    registry.register("runningsum")(RunningSum)


def test_it_is_causal_unless_told_otherwise() -> None:
    assert build("runningsum", dim=8).config.causal
    assert build("softmax", dim=8).config.causal is False
    assert build("runningsum", dim=8, causal=True).config.causal


def test_the_bidirectional_form_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"runningsum cannot look both ways.*softmax.*linformer") as refusal:
        build("runningsum", dim=8, causal=False)
    assert "runningsum" not in str(refusal.value).partition(". ")[2], "it does not recommend itself"
    with pytest.raises(ValueError, match="runningsum cannot look both ways"):
        RunningSum(MixerConfig(dim=8))


def test_capabilities_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be neither"):
        Capabilities(causal=False, cross=False, grid=False, state="none", bidirectional=False)
    for more in ({"cross": True, "grid": False}, {"cross": False, "grid": True}):
        with pytest.raises(ValueError, match="causal only reads sequences"):
            Capabilities(causal=True, state="none", bidirectional=False, **more)


def test_models_take_it_in_decoders_only() -> None:
    stack = {"layers": 2, "ffn_dim": 16, "heads": 2, "mixer": "runningsum"}
    model = build_model("language-model", dim=8, vocab=11, decoder=stack)
    assert torch.isfinite(model(torch.ones(2, 5, dtype=torch.int64)).logits).all()
    mixed = build_model("language-model", dim=8, vocab=11, decoder=stack | {"mixer": "softmax,runningsum"})
    assert [mixer.name for mixer in mixed.modules() if isinstance(mixer, Mixer)] == ["softmax", "runningsum"]
    with pytest.raises(ValueError, match=r"encoder.*runningsum cannot look both ways.*softmax"):
        build_model("text-classifier", dim=8, vocab=11, num_classes=2, encoder=stack)
    with pytest.raises(ValueError, match="runningsum cannot read a context"):
        build_model("encoder-decoder", dim=8, source_vocab=11, target_vocab=11, decoder=stack | {"cross": "runningsum"})


def test_a_causal_stack_does_not_look_ahead_by_an_option() -> None:
    for name in ("softmax", "linformer"):
        stack = {"layers": 1, "ffn_dim": 16, "heads": 2, "mixer": {"name": name, "causal": False}}
        with pytest.raises(ValueError, match=f"{name}: causal=False would show later tokens"):
            build_model("language-model", dim=8, vocab=11, decoder=stack)


def test_comparisons_put_it_where_it_can_stand() -> None:
    recipe = read_recipe("phrases")
    variant = build_variant(recipe, "sum", "runningsum", {}, recipe.model)
    assert variant.model["encoder"]["mixer"]["name"] == "lightconv"
    assert variant.model["decoder"]["mixer"]["name"] == "runningsum"
    assert variant.remarks == ("sum is causal only: the encoder has lightconv",)


def test_bench_measures_the_form_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--lengths", "9", "--dim", "16", "--heads", "2", "--repeats", "1", "--json"]
    rows = {}
    for form in ([], ["--causal"]):
        assert run(["bench", "--mixers", "runningsum,lara", *small, *form]) == 0
        rows[bool(form)] = {row["mixer"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows[False]["runningsum"]["status"] == "refused"
    assert "runningsum cannot look both ways" in rows[False]["runningsum"]["reason"]
    assert rows[True]["runningsum"]["status"] == "done"
    assert (rows[False]["lara"]["status"], rows[True]["lara"]["status"]) == ("done", "refused")


def test_bench_still_refuses_wrong_options() -> None:
    for causal in (False, True):
        plan = BenchPlan(["runningsum"], [8], causal=causal, options={"runningsum": {"windw": 3}})
        with pytest.raises(ValueError, match="runningsum has no option 'windw'"):
            build_or_refuse(plan, "runningsum")


def test_info_recommends_a_call_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "runningsum"]) == 0
    shown = capsys.readouterr().out
    assert "bidirectional: refuse" in shown
    (option,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["causal"]]
    assert option[2] == "True", "the default"
    assert "y_t = W (x_1 + ... + x_t)" in shown
    assert shown.strip().endswith(f"Python: {__name__}.RunningSum(dim=256, heads=4)")
    assert RunningSum(dim=256, heads=4).config.causal


def test_its_figure_shows_the_form_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    import draw

    figure = draw.influence_figure("runningsum")
    assert "causal" in figure
    assert "bidirectional" not in figure
