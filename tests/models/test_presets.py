"""Presets: parameter counts of the papers, tiny versions of each that train with every mechanism in every place."""

import pytest
import torch

from subquad.models import PRESETS, Model, build_model, preset
from tests.models.cases import Place, able, places, run, tiny

MILLION = 1e6

# Non-embedding parameters, in millions, of the convolution models: dynamic, lightweight.
CONVOLUTIONS = {
    "lightconv_iwslt_de_en": (27.4, 26.8),
    "lightconv_wmt_en_de": (45.0, 43.9),
    "lightconv_wmt_en_de_big": (179.7, 175.3),
    "lightconv_wmt_en_fr_big": (179.7, 175.3),
    "lightconv_wmt_zh_en_big": (179.7, 175.3),
}
EVA_LANGUAGE = {"name": "eva", "variant": "decoder", "window": 128, "chunk_size": 8, "relative": "t5"}
EXACT = {
    ("transformer_wmt_en_de", "softmax"): 60_915_712,
    ("transformer_lm_wiki103", "softmax"): 246_933_504,
    ("transformer_lm_wiki103_32", "softmax"): 448_473_088,
    ("transformer_lm_wiki103", "eva"): 247_471_104,
    ("transformer_lm_wiki103_32", "eva"): 449_548_288,
    ("evit_tiny_p16", "softmax"): 5_717_032,
    ("evit_small_p16", "softmax"): 22_049_896,
    ("evit_base_p16", "softmax"): 86_566_120,
    ("pvt_v2_b3", "softmax"): 36_011_496,
}
# crybot's counts, in millions, hold an output map of 512 x 512 in each of 18 attention modules that nothing reads
UNREAD = 18 * 512 * 512
CRYBOT = {"vanilla_translation": 95.60, "linformer_translation_k32": 95.80, "linformer_translation_k64": 95.99}


def on_meta(name: str, **changes: object) -> Model:
    with torch.device("meta"):
        return build_model(name, **changes)


def without_words(model: Model) -> int:
    words = ("source.", "target.", "embedding.", "head.weight")
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(words))


@pytest.mark.parametrize("name", PRESETS)
def test_builds_on_the_meta_device(name: str) -> None:
    model = on_meta(name)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(("name", "counts"), CONVOLUTIONS.items())
def test_convolution_models_have_the_counts_of_the_paper(name: str, counts: tuple[float, float]) -> None:
    for mechanism, millions in zip(("dynamicconv", "lightconv"), counts, strict=True):
        changes = {}
        for side in ("encoder", "decoder"):
            mixer = dict(preset(name)[side]["mixer"])
            changes[side] = {"mixer": {**mixer, "name": mechanism}}
        assert without_words(on_meta(name, **changes)) / MILLION == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(("key", "count"), EXACT.items(), ids=lambda value: str(value))
def test_exact_counts(key: tuple[str, str], count: int) -> None:
    name, mechanism = key
    changes = {"decoder": {"mixer": EVA_LANGUAGE}} if mechanism == "eva" else {}
    assert on_meta(name, **changes).parameter_count() == count


@pytest.mark.parametrize(
    ("mixer", "count"),
    [
        (
            {"name": "eva", "window": 32, "landmarks": 8, "adaptive": "linear", "relative": "t5", "overlap": True},
            60966784,
        ),
        ({"name": "lara", "landmarks": 32, "proposal": "adaptive"}, 60967168),
    ],
    ids=["eva", "lara"],
)
def test_translation_with_an_efficient_encoder(mixer: dict[str, object], count: int) -> None:
    assert on_meta("transformer_wmt_en_de", encoder={"mixer": mixer}).parameter_count() == count


@pytest.mark.parametrize(("name", "millions"), CRYBOT.items())
def test_linformer_translation(name: str, millions: float) -> None:
    assert (on_meta(name).parameter_count() + UNREAD) / MILLION == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize("place", list(places()), ids=lambda place: f"{place.preset}-{place.where}")
def test_trains_with_every_mechanism_that_can_stand_there(place: Place) -> None:
    for mechanism in able(place.where):
        torch.manual_seed(0)
        model = tiny(place.preset, place.where, mechanism).train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        output = run(model)
        loss = output.logits.float().square().mean() + (output.aux.mean() if output.aux is not None else 0)
        loss.backward()
        assert torch.isfinite(loss), mechanism
        used = [p.grad for p in model.parameters() if p.grad is not None]
        assert used, mechanism
        assert all(torch.isfinite(gradient).all() for gradient in used), mechanism
        optimiser.step()
        assert torch.isfinite(run(model).logits).all(), mechanism


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'evit_tiny_p16'"):
        preset("evit_tiny_16")


def test_changes_are_merged_and_a_named_mixer_replaces() -> None:
    data = preset("lightconv_wmt_en_de", {"encoder": {"mixer": {"glu": False}, "layers": 7}, "dim": 64})
    assert data["encoder"]["mixer"]["name"] == "dynamicconv"
    assert data["encoder"]["mixer"]["glu"] is False
    data = preset("lightconv_wmt_en_de", {"encoder": {"mixer": {"name": "eva", "window": 8}}})
    assert data["encoder"]["mixer"] == {"name": "eva", "window": 8}
    assert preset("lightconv_wmt_en_de")["encoder"]["mixer"]["glu"] is True, "the preset itself stays as it is"
