"""Attention of transformers and timm models gives way to mixers: nothing else changes, and it can be undone."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import subquad
from subquad.interop.patching.host import SwappedAttention
from subquad.mixers import available, mixer_class
from subquad.packages import require_torchvision
from subquad.testing import close
from tests.models.cases import able
from tests.preloaded import afresh

pytestmark = pytest.mark.usefixtures("preloaded_programs")

transformers = pytest.importorskip("transformers")
require_torchvision()  # timm imports it, also where it was built for another torch
timm = pytest.importorskip("timm")

LENGTH, VOCABULARY = 11, 40
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = TEXT | {"intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 1}
DECODER = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
DECODER |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
IMAGES |= {"image_size": 8, "patch_size": 2, "num_channels": 1}
TIMM = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 10}


def hugging_face(kind: str, settings: dict[str, Any]) -> Callable[[Path], Any]:
    """A model of that class, from files of its own making."""

    def make(folder: Path) -> Any:
        model = getattr(transformers, kind)
        config = model.config_class(**settings)
        disturbed(model(config)).save_pretrained(folder)
        loaded, report = model.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values())
        return loaded.eval()

    return make


def from_timm(kind: str, **settings: Any) -> Callable[[Path], Any]:
    """The same with timm."""

    def make(folder: Path) -> Any:
        file = folder / "model.safetensors"
        save_file(disturbed(timm.create_model(kind, **TIMM | settings)).state_dict(), file)
        return timm.create_model(kind, **TIMM | settings, checkpoint_path=str(file)).eval()

    return make


def disturbed(model: nn.Module) -> Any:
    """Weights with which attention is far from uniform, biases included."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


HOSTS = {
    "bert": hugging_face("BertModel", ENCODER),
    "roberta": hugging_face("RobertaModel", ENCODER),
    "vit": hugging_face("ViTModel", IMAGES),
    "vit without biases": hugging_face("ViTModel", IMAGES | {"qkv_bias": False}),
    "deit": hugging_face("DeiTModel", IMAGES),
    "gpt2": hugging_face("GPT2LMHeadModel", DECODER),
    "gpt2 scaled by layer": hugging_face("GPT2LMHeadModel", DECODER | {"scale_attn_by_inverse_layer_idx": True}),
    "bert decoder": hugging_face("BertLMHeadModel", ENCODER | {"is_decoder": True}),
    "timm vit": from_timm("vit_tiny_patch16_224"),
    "timm vit on a grid": from_timm("vit_tiny_patch16_224", class_token=False, global_pool="avg"),
    "timm deit": from_timm("deit_tiny_distilled_patch16_224"),
}
READS_IMAGES = ("vit", "deit")


def inputs(host: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if any(kind in host for kind in READS_IMAGES):
        return {"x" if "timm" in host else "pixel_values": torch.randn(2, 1, 8, 8, generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :4] = 0  # on the left, where it moves every position
    return {"input_ids": tokens, "attention_mask": mask}


@torch.no_grad()
def outputs(model: nn.Module, host: str) -> Tensor:
    """What the model computes of its tokens; padded positions hold nothing of meaning."""
    given = inputs(host)
    found = model(**given)
    if "timm" in host:
        return found[0] if isinstance(found, tuple) else found
    return found[0][given["attention_mask"].bool()] if "attention_mask" in given else found[0]


def mixers(model: nn.Module) -> list[Any]:
    return [module.mixer for module in model.modules() if isinstance(module, SwappedAttention)]


@pytest.mark.parametrize("host", HOSTS)
def test_a_window_over_everything_changes_nothing_and_undo_restores_every_bit(host: str, tmp_path: Path) -> None:
    model = HOSTS[host](tmp_path)
    before = outputs(model, host)
    swapped = subquad.swap(model, "local", window=32)
    assert [layer.number for layer in swapped.replaced] == [0, 1]
    assert not swapped.refused
    assert not any(layer.weights.new or layer.weights.dropped for layer in swapped.replaced)
    assert [mixer.name for mixer in mixers(model)] == ["local", "local"]
    assert close(outputs(model, host), before)
    swapped.undo()
    assert torch.equal(outputs(model, host), before)
    assert not mixers(model)


def test_a_mechanism_without_weights_is_undone(tmp_path: Path) -> None:
    model = HOSTS["bert"](tmp_path)
    before = outputs(model, "bert")
    swapped = subquad.swap(model, "identity")
    model.double()
    swapped.undo()
    assert close(outputs(model.float(), "bert"), before)


@pytest.mark.parametrize("mechanism", able("encoder"))
def test_every_mechanism_keeps_the_weights_it_has_places_for(mechanism: str, tmp_path: Path) -> None:
    model = HOSTS["bert"](tmp_path)
    before = outputs(model, "bert")
    attention = model.encoder.layer[0].attention
    q, k, v = (getattr(attention.self, name).weight.detach().clone() for name in ("query", "key", "value"))
    out = attention.output.dense.weight.detach().clone()
    swapped = subquad.swap(model, mechanism)
    (mixer, _), (first, _) = mixers(model), swapped.replaced
    maps = {"qkv": [q, k, v], "qk": [q, k], "in_proj": [v], "out": [out], "out_proj": [out]}
    for name, weights in maps.items():
        if hasattr(mixer, name):
            expected = torch.cat(weights)
            assert torch.equal(getattr(mixer, name).weight[: len(expected)], expected)
    host = {f"{part}.{kind}" for part in ("q", "k", "v", "out") for kind in ("weight", "bias")}
    assert {*first.weights.kept, *first.weights.dropped} == host
    assert "out.weight" in first.weights.kept
    new = {name.partition("[")[0] for name in first.weights.new}
    assert {name for name in mixer.state_dict() if name.split(".")[0] not in maps} <= new
    assert all(name in str(swapped) for name in (mechanism, first.path, first.kind))
    assert outputs(model, "bert").isfinite().all()
    swapped.undo()
    assert torch.equal(outputs(model, "bert"), before)


def test_training_a_swapped_model_leaves_the_original_attention_alone(tmp_path: Path) -> None:
    model = HOSTS["timm vit"](tmp_path)
    attention = model.blocks[0].attn
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    swapped = subquad.swap(model.train(), "eva", window=2, landmarks=4)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs("timm vit")).square().sum().backward()
    assert all(parameter.grad is not None for mixer in mixers(model) for parameter in mixer.parameters())
    optimiser.step()
    model.eval().double()
    swapped.undo()
    assert model.blocks[0].attn is attention
    assert not attention.training
    assert attention.qkv.weight.dtype == torch.float64
    assert all(torch.equal(tensor.float(), before[name]) for name, tensor in attention.state_dict().items())
    with pytest.raises(ValueError, match="undone already"):
        swapped.undo()


def test_some_layers_can_be_chosen_and_the_others_swapped_later(tmp_path: Path) -> None:
    model = HOSTS["bert"](tmp_path)
    before = outputs(model, "bert")
    last = subquad.swap(model, "performer", layers=[-1])
    assert [layer.path for layer in last.replaced] == ["encoder.layer.1.attention"]
    rest = subquad.swap(model, "lightconv", kernel_size=3)
    assert [layer.number for layer in rest.replaced] == [0]
    assert "performer already" in rest.refused[0].reason
    assert "not replaced: encoder.layer.1.attention" in str(rest)
    last.undo()
    rest.undo()
    assert torch.equal(outputs(model, "bert"), before)


def test_patches_without_a_class_token_are_a_grid(tmp_path: Path) -> None:
    def swapped_outputs(host: str, **options: Any) -> Tensor:
        model = HOSTS[host](tmp_path)
        subquad.swap(model, "local", **options)
        return outputs(model, host)

    rows = swapped_outputs("timm vit on a grid", window=4, dims=1)  # windows over a sequence: the rows of the grid
    assert not close(rows, swapped_outputs("timm vit on a grid", window=4))
    assert not close(rows, swapped_outputs("timm vit on a grid", window=2))
    with pytest.raises(ValueError, match="grid"):
        swapped_outputs("timm vit", window=2, dims=2)


def test_heads_of_another_width_go_to_mechanisms_that_have_them(tmp_path: Path) -> None:
    model = hugging_face("ViTModel", IMAGES | {"head_dim": 6})(tmp_path)
    before = outputs(model, "vit")
    with pytest.raises(ValueError, match="the layer's have 6"):
        subquad.swap(model, "local")
    subquad.swap(model, "softmax")
    assert close(outputs(model, "vit"), before)


def test_weights_of_a_swapped_model_go_through_a_file(tmp_path: Path) -> None:
    model = HOSTS["deit"](tmp_path)
    subquad.swap(model, "lara", landmarks=4)
    save_file(model.state_dict(), tmp_path / "swapped.safetensors")
    other = HOSTS["deit"](tmp_path)
    subquad.swap(other, "lara", landmarks=4)
    other.load_state_dict(load_file(tmp_path / "swapped.safetensors"))
    assert torch.equal(outputs(other, "deit"), outputs(model, "deit"))


# ---------------------------------------------------------------------- masks


def test_additive_masks_of_eager_attention_are_read_alike(tmp_path: Path) -> None:
    for host in ("roberta", "gpt2"):
        model = HOSTS[host](tmp_path)
        subquad.swap(model, "performer")
        expected = outputs(model, host)
        model.set_attn_implementation("eager")
        assert torch.equal(outputs(model, host), expected)


def test_masks_that_say_more_than_padding_are_refused(tmp_path: Path) -> None:
    bert, gpt2, vit = (HOSTS[host](tmp_path) for host in ("bert", "gpt2", "timm vit"))
    for model in (bert, gpt2, vit):
        subquad.swap(model, "local", window=4)
    tokens = inputs("bert")["input_ids"]
    pairs = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    pairs[:, :, 0, 3] = False
    with pytest.raises(ValueError, match="only masks of padding"):
        bert(tokens, attention_mask=pairs)
    with pytest.raises(ValueError, match="other numbers than 0"):
        bert(tokens, attention_mask=torch.full((2, 1, LENGTH, LENGTH), -0.5))
    packed = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]).expand(2, -1)
    with pytest.raises(ValueError, match="only masks of padding and the causal order"):
        gpt2(tokens, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="not causal was called"):
        vit(**inputs("timm vit"), is_causal=True)
    seen = torch.ones(17, 17, dtype=torch.bool)
    assert close(vit(**inputs("timm vit"), attn_mask=seen), vit(**inputs("timm vit")))


# ---------------------------------------------------------------------- generation


def generate(model: Any, **options: Any) -> Any:
    settings = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs("gpt2"), **settings | options)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generation_goes_on_as_before_when_nothing_changes(options: dict[str, Any], tmp_path: Path) -> None:
    model = HOSTS["gpt2"](tmp_path)
    before = generate(model, **options)
    subquad.swap(model, "local", window=64, layers=[1])  # one layer of the cache is ours, the other is not
    after = generate(model, **options)
    assert torch.equal(after.sequences, before.sequences)
    assert all(close(a, b) for a, b in zip(after.logits, before.logits, strict=True))


STREAMING = [name for name in available() if mixer_class(name).capabilities.causal]


@pytest.mark.parametrize("mechanism", STREAMING)
def test_a_cache_changes_nothing(mechanism: str, tmp_path: Path) -> None:
    model = HOSTS["gpt2"](tmp_path)
    options: dict[str, Any] = {"window": 4} if mechanism in ("eva", "local") else {}
    subquad.swap(model, mechanism, **options)
    with_cache, without = generate(model), generate(model, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    assert all(close(a, b) for a, b in zip(with_cache.logits, without.logits, strict=True))


def test_a_mechanism_that_cannot_stream_generates_without_a_cache(tmp_path: Path) -> None:
    model = HOSTS["gpt2"](tmp_path)
    swapped = subquad.swap(model, "eva", window=4, landmarks=4)
    assert "use_cache is now False" in str(swapped)
    assert torch.equal(generate(model).sequences, generate(model, use_cache=False).sequences)
    with pytest.raises(ValueError, match="number of chunks"):
        generate(model, use_cache=True)
    swapped.undo()
    assert model.config.use_cache
    assert model.generation_config.use_cache


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_swaps_without_a_cache_are_undone_in_either_order(order: tuple[int, int], tmp_path: Path) -> None:
    model = HOSTS["gpt2"](tmp_path)
    before = outputs(model, "gpt2")
    swaps = [subquad.swap(model, "eva", window=4, landmarks=4, layers=[layer]) for layer in (0, 1)]
    for number in order:
        swaps[number].undo()
    assert model.config.use_cache
    assert model.generation_config.use_cache is not False
    assert torch.equal(outputs(model, "gpt2"), before)


def test_a_regulariser_that_is_left_out_is_reported(tmp_path: Path) -> None:
    reports = {name: str(subquad.swap(HOSTS["timm vit"](tmp_path), name)) for name in able("encoder")}
    assert [name for name, report in reports.items() if "the regulariser" in report] == ["primal"]


def test_a_cache_is_not_kept_while_training_and_a_filled_one_is_not_taken_over(tmp_path: Path) -> None:
    model = HOSTS["gpt2"](tmp_path)
    tokens = inputs("gpt2")["input_ids"]
    filled = model(tokens).past_key_values
    subquad.swap(model, "primal")
    with pytest.raises(ValueError, match="filled before the layer was swapped"):
        model(tokens, past_key_values=filled)
    training = model.train()(tokens)
    training.logits.sum().backward()
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        model(tokens[:, :1], past_key_values=training.past_key_values)
    read = model.eval()(tokens).past_key_values
    assert read.get_seq_length() == LENGTH
    read.batch_repeat_interleave(2)
    read.batch_select_indices(torch.tensor([False, True, True, False]))  # one row of each token sequence
    went_on = model(tokens[:, :1], past_key_values=read).logits
    assert close(went_on, model(torch.cat([tokens, tokens[:, :1]], 1)).logits[:, -1:])
    with pytest.raises(ValueError, match="cannot forget"):
        read.crop(-1)
    read.reset()
    assert torch.equal(model(tokens, past_key_values=read).logits, model(tokens).logits)


# ---------------------------------------------------------------------- refusals


def test_cross_attention_stays(tmp_path: Path) -> None:
    model = hugging_face("GPT2LMHeadModel", DECODER | {"add_cross_attention": True})(tmp_path)
    swapped = subquad.swap(model, "local", window=64)
    assert [layer.path for layer in swapped.replaced] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert {left.path for left in swapped.refused} == {f"transformer.h.{n}.crossattention" for n in (0, 1)}


@pytest.mark.parametrize(
    ("host", "mechanism", "options", "message"),
    [
        ("gpt2", "lara", {}, "lara cannot be causal"),
        ("bert", "evaa", {}, "did you mean 'eva'"),
        ("bert", "eva", {"windw": 4}, "did you mean 'window'"),
        ("bert", "eva", {"heads": 2}, "heads follows from the model"),
        ("bert", "eva", {"layers": [2]}, "there is no layer 2"),
        ("bert", "eva", {"layers": []}, "layers is empty"),
        ("bert", "linformer", {"share_kv": True, "share_layers": True}, "cannot have share_layers=True here"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    host: str, mechanism: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = HOSTS[host](tmp_path)
    before = outputs(model, host)
    with pytest.raises(ValueError, match=message):
        subquad.swap(model, mechanism, **options)
    assert torch.equal(outputs(model, host), before)


def test_attention_that_no_mixer_equals_is_refused() -> None:
    with pytest.raises(ValueError, match="normalised queries"):
        subquad.swap(timm.create_model("vit_tiny_patch16_224", **TIMM, qk_norm=True), "local")
    with pytest.raises(ValueError, match="Linear has no attention"):
        subquad.swap(nn.Linear(2, 2), "local")
    model = timm.create_model("vit_tiny_patch16_224", **TIMM)
    model.blocks[0].attn.qkv = torch.nn.utils.parametrizations.weight_norm(model.blocks[0].attn.qkv)
    swapped = subquad.swap(model, "local")
    assert "its map qkv should be a plain linear map, but it is a ParametrizedLinear" in str(swapped)
    model.blocks[1].attn = nn.Identity()
    with pytest.raises(ValueError, match="changed after the swap"):
        swapped.undo()


# ---------------------------------------------------------------------- programs


def test_the_name_is_there_without_loading_anything() -> None:
    python = """
import sys, subquad
assert "torch" not in sys.modules
subquad.swap
assert "torch" in sys.modules
assert not {"transformers", "timm"} & set(sys.modules)
try:
    subquad.swop
except AttributeError as error:
    assert "swop" in str(error)
else:
    raise AssertionError
"""
    with afresh():
        subprocess.run([sys.executable, "-c", python], check=True)


def example(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "subquad.examples.swap_vit", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.nightly
def test_the_example_shows_what_is_lost_and_regained() -> None:
    done = example("--mixers", "local,performer", "--epochs", "8", "--tune-epochs", "3")
    assert done.returncode == 0, done.stderr
    head, columns, *rows = done.stdout.splitlines()[-5:]
    assert columns.split() == ["swapped", "in", "lost", "fine-tuned", "regained"]
    trained, table = float(head.split()[-1]), {}
    for row in rows:
        what, *shares = row.rsplit(maxsplit=4)
        swapped, lost, tuned, regained = table[what.strip()] = [float(share) for share in shares]
        assert lost == pytest.approx(trained - swapped, abs=1e-9)
        assert regained == pytest.approx(tuned - swapped, abs=1e-9)
    assert list(table) == ["local window=2", "performer", "softmax, not swapped"]
    assert table["softmax, not swapped"][:2] == [trained, 0.0]
    _, lost, tuned, regained = table["local window=2"]
    assert min(lost, regained) > 0.1
    assert tuned > 0.5


def test_the_example_refuses_what_it_cannot_do() -> None:
    refused = example("local", "window=2", "overlap")
    assert refused.returncode == 1
    assert refused.stderr == "swap_vit: 'overlap' is no option; write option=value\n"
    assert "did you mean 'local'" in example("--mixers", "performer,locl").stderr
    program = """
import runpy, sys
sys.modules["timm"] = None
runpy.run_module("subquad.examples.swap_vit", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "swap_vit: this example needs the package timm: pip install timm\n"
