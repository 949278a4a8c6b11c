"""`subquad import`: checkpoints of the efficient-attention library, PrimalAttention and the Linformers.

No such file is at hand, so each is written here, in the layout of its program, from the weights of golden fixtures.
"""

import argparse
import functools
import importlib.util
import io
import json
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer as Engine
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from subquad.cli.main import run as command
from subquad.data.images.transforms import AugmentOptions
from subquad.interop.checkpoints.fairseq.models import PAD
from subquad.interop.checkpoints.vision.convert import evit_options, pyramid_options
from subquad.interop.export.card import model_card
from subquad.models import LanguageModel, Seq2Seq
from subquad.packages import require_torchvision
from subquad.tasks.image_classification import ImageData
from subquad.train.recipe import Recipe
from subquad.train.run import LoadedRun, load_trained
from tests.originals.fairseq_models import LOG_PROBABILITY_TOLERANCE
from tests.originals.files import FOLDER, OUTPUT_TOLERANCE, Fixture, assert_close, load, padding_of

LIBRARY, PRIMAL, LINFORMER = (FOLDER / name for name in ("efficient-attention", "primal", "linformer"))


def found(folder: Path, pattern: str) -> list[Any]:
    """Fixtures of a kind, as parameters of a test."""
    return [pytest.param(path, id=path.stem) for path in sorted(folder.glob(f"{pattern}.safetensors"))]


def sample(folder: Path, pattern: str) -> Fixture:
    """One fixture of a kind."""
    return load(min(folder.glob(f"{pattern}.safetensors")))


@pytest.fixture
def nested(monkeypatch: pytest.MonkeyPatch) -> type[argparse.Namespace]:
    """The library's namespace, under the name by which pickles ask for it."""
    library = types.ModuleType("efficient_attention")
    kind = type("NestedNamespace", (argparse.Namespace,), {"__module__": library.__name__})
    library.NestedNamespace = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return kind


def imported(contents: Mapping[str, Any], folder: Path) -> LoadedRun:
    """What the command makes of a file with these contents; the library is not there when it is read."""
    torch.save(contents, folder / "checkpoint.pt")
    sys.modules.pop("efficient_attention", None)
    assert command(["import", str(folder / "checkpoint.pt"), "--out", str(folder / "run")]) == 0
    return load_trained(folder / "run")


def refused(contents: Mapping[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says why."""
    torch.save(contents, folder / "checkpoint.pt")
    assert command(["import", str(folder / "checkpoint.pt"), "--out", str(folder / "run")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not (folder / "run").exists()
    return said


def check_goes_on(run: Path, lines: list[str]) -> None:
    """An imported run is evaluated, trained further and exported. lines: of a text, or of source and target."""
    files = []
    for number, line in enumerate(lines):
        files.append(str(run.parent / f"{number}.txt"))
        Path(files[-1]).write_text(f"{line}\n" * 6)
    splits = [f"data.splits.{split}=[{', '.join(files)}]" for split in ("train", "valid", "test")]
    assert command(["evaluate", str(run), *splits, "decode.max_len_b=4"]) == 0
    short = ["train.updates=2", "train.budget.max_tokens=64"]
    assert command(["train", str(run / "recipe.yaml"), "--out", str(run), *splits, *short]) == 0
    assert load_trained(run, "last").update == 2
    assert command(["export", str(run), "--to", "torch", "--out", str(run.parent / "exported")]) == 0


# ---------------------------------------------------------------------- text: forks of fairseq


def write_dictionary(path: Path, size: int) -> None:
    path.write_text("".join(f"w{number} 1\n" for number in range(size - 4)))


def library_options(config: Mapping[str, Any], nested: type[argparse.Namespace]) -> dict[str, Any]:
    """The model's options, those of attention in namespaces of their own."""
    return {name: nested(**value) if isinstance(value, dict) else value for name, value in config.items()}


@pytest.mark.parametrize("path", found(LIBRARY, "fairseq_lm_*"))
def test_a_language_model_of_the_library(path: Path, tmp_path: Path, nested: type[argparse.Namespace]) -> None:
    fixture = load(path)
    state = fixture.under("state.")
    vocab = sum(len(value) for name, value in state.items() if "embed_tokens" in name and name.endswith("0.weight"))
    write_dictionary(tmp_path / "dict.txt", vocab or len(state["decoder.embed_tokens.weight"]))
    model = argparse.Namespace(**library_options(fixture.config, nested), arch="transformer_lm_wiki103")
    groups = {"task": {"_name": "language_modeling", "tokens_per_sample": 64}, "optimization": {"lr": [1.0]}}
    loaded = imported({"args": None, "cfg": {"model": model, **groups}, "model": state}, tmp_path)
    assert isinstance(loaded.model, LanguageModel)
    tokens = next(fixture[key] for key in ("src_tokens", "tokens") if key in fixture)
    there = tokens != PAD
    with torch.no_grad():
        logits = loaded.model(tokens, padding=padding_of(tokens)).logits[there]
    if "logits" in fixture:
        assert_close(logits, fixture["logits"][there], OUTPUT_TOLERANCE, "logits")
    else:
        assert_close(
            logits.log_softmax(-1), fixture["log_probs"][there], LOG_PROBABILITY_TOLERANCE, "log-probabilities"
        )


@pytest.mark.parametrize("path", found(LIBRARY, "fairseq_mt_*"))
def test_a_translation_model_of_the_library(path: Path, tmp_path: Path, nested: type[argparse.Namespace]) -> None:
    fixture = load(path)
    state = fixture.under("state.")
    for language, side in (("en", "encoder"), ("de", "decoder")):
        write_dictionary(tmp_path / f"dict.{language}.txt", len(state[f"{side}.embed_tokens.weight"]))
    names = {"arch": "transformer_wmt_en_de", "task": "translation", "source_lang": "en", "target_lang": "de"}
    args = argparse.Namespace(**library_options(fixture.config, nested), **names, lr=[7e-4])
    model = imported({"args": args, "model": state}, tmp_path).model
    assert isinstance(model, Seq2Seq)
    source, target = fixture["src_tokens"], fixture["prev_output_tokens"]
    padding = padding_of(source)
    there = target != PAD
    if padding is not None:  # the library's encoders read padding
        there = there & ~padding.any(1, keepdim=True)
    assert there.any()
    with torch.no_grad():
        logits = model(source, target, source_padding=padding).logits
    assert_close(logits[there], fixture["logits"][there], OUTPUT_TOLERANCE, "logits")


@pytest.mark.parametrize("path", found(PRIMAL, "nlp_lm_*"))
def test_a_language_model_with_primal_attention(path: Path, tmp_path: Path) -> None:
    fixture = load(path)
    config = fixture.config
    write_dictionary(tmp_path / "dict.txt", config["vocab"])
    args = argparse.Namespace(
        arch="transformer_lm",
        task="language_modeling",
        lr=[1e-3],
        decoder_attention_heads=config["heads"],
        decoder_normalize_before=config["normalize_before"],
        share_decoder_input_output_embed=config["share_input_output"],
        activation_fn=config["activation"],
    )
    model = imported({"args": args, "model": fixture.under("weights.")}, tmp_path).model
    tokens = fixture["in.tokens"]
    padding, there = padding_of(tokens), tokens != PAD
    if padding is not None:  # the original reads padding that comes before a token
        there = there & (padding.int().diff(dim=1) >= 0).all(1, keepdim=True)
    with torch.no_grad():
        logits = model(tokens, padding=padding).logits
    assert_close(logits[there], fixture["out.logits"][there], OUTPUT_TOLERANCE, "logits")
    check_goes_on(tmp_path / "run", ["w1 w2 w3 w4 w5"])


# ---------------------------------------------------------------------- images


def library_images(fixture: Fixture, nested: type[argparse.Namespace]) -> dict[str, Any]:
    """A checkpoint of the library's vit program. Its tiny models have heads that no name says."""
    config = fixture.config
    kept = ("input_size", "patchify_stem", "use_glu", "no_pos_emb", "patch_size", "num_heads", "attn_name")
    args = nested(**{name: config[name] for name in kept if name in config})
    args.model = "evit_test" if config["model"] == "EfficientTransformer" else "pvt_test"
    args.attn_args, args.drop_path_rate = nested(**config["attn_args"]), config["drop_path_rate"]
    args.epochs = 300
    return {"model": fixture.under("state."), "args": args, "epoch": 4, "optimizer": {"state": {}}}


@pytest.mark.parametrize("path", found(LIBRARY, "model_*"))
def test_image_classifiers_of_the_library(path: Path, tmp_path: Path, nested: type[argparse.Namespace]) -> None:
    fixture = load(path)
    loaded = imported(library_images(fixture, nested), tmp_path)
    with torch.no_grad():
        logits = loaded.model(fixture["input"]).logits
    assert_close(logits, fixture["logits"], OUTPUT_TOLERANCE, "logits")
    assert loaded.recipe.train.epochs == 300
    assert loaded.inputs["classes"] == [str(number) for number in range(logits.shape[1])]


@pytest.mark.parametrize("eps", [1e-6, 0.25])
@pytest.mark.parametrize("pattern", ["model_evit_*", "model_pvt_*"])
def test_image_checkpoints_as_the_librarys_main_writes_them(
    pattern: str, eps: float, tmp_path: Path, nested: type[argparse.Namespace]
) -> None:
    """args is the namespace in which models leave what they were built from: the norm as a partial, tuples, aliases."""
    fixture = sample(LIBRARY, pattern)
    contents = library_images(fixture, nested)
    args = contents["args"]
    args.norm_layer, args.attn_specific_args = functools.partial(torch.nn.LayerNorm, eps=eps), args.attn_args
    args.qkv_bias, args.opt_betas, args.lr, args.sched, args.in_chans = (True,), None, 1e-3, "cosine", 3
    scheduler = {"base_values": [1e-3], "updates": None, "noise_range_t": None, "cycle_mul": 1.0}
    loaded = imported(contents | {"lr_scheduler": scheduler, "model_ema": None}, tmp_path)
    norms = [part.eps for part in loaded.model.modules() if isinstance(part, torch.nn.LayerNorm)]
    assert eps in norms
    with torch.no_grad():
        logits = loaded.model(fixture["input"]).logits
    if eps == 1e-6:  # that of the fixture
        assert_close(logits, fixture["logits"], OUTPUT_TOLERANCE, "logits")


@pytest.mark.parametrize("path", found(PRIMAL, "cv_combo_*") + found(PRIMAL, "cv_primalformer_*"))
def test_image_classifiers_with_primal_attention(path: Path, tmp_path: Path) -> None:
    fixture = load(path)
    config = fixture.config
    args = argparse.Namespace(
        model="deit_test", input_size=config["img"], rank_multi=config["rank_multi"], eta=config["eta"], epochs=300
    )
    loaded = imported({"model": fixture.under("weights."), "args": args, "epoch": 0}, tmp_path)
    with torch.no_grad():
        logits = loaded.model(fixture["in.x"]).logits
    assert_close(logits, fixture["out.logits"], OUTPUT_TOLERANCE, "logits")
    assert loaded.recipe.train.aux_weight == config["eta"]


def deit(width: int, heads: int) -> Any:
    """timm's own model of a class token and softmax attention, which is DeiT's."""
    require_torchvision()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    size = {"embed_dim": width, "num_heads": heads, "depth": 2, "img_size": 32, "num_classes": 3}
    return timm.models.VisionTransformer(**size).eval()


@pytest.mark.parametrize(("width", "heads", "said"), [(192, 3, None), (80, 5, 5)])
def test_a_plain_vit_computes_what_timms_does(width: int, heads: int, said: int | None, tmp_path: Path, capsys) -> None:
    theirs = deit(width, heads)
    args = argparse.Namespace(model="deit_test", num_heads=said)
    ours = imported({"model": theirs.state_dict(), "args": args}, tmp_path).model
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(ours(images).logits, theirs(images), OUTPUT_TOLERANCE, "logits")
    assert "model of DeiT, deit_test" in capsys.readouterr().out


def test_heads_that_nobody_knows_are_not_guessed(tmp_path: Path, capsys) -> None:
    said = refused({"model": deit(80, 5).state_dict()}, tmp_path, capsys)
    assert "ViT is 80 wide, and its number of heads is not known" in said
    assert "192, 384, 768" in said


def deit_recipe(folder: Path, nested: type[argparse.Namespace], **options: Any) -> Recipe:
    """Of an import whose args have these options, and what DeiT's command line always has."""
    contents = library_images(sample(LIBRARY, "model_evit_*"), nested)
    common = {"lr": 1e-3, "min_lr": 1e-5, "warmup_lr": 1e-6, "warmup_epochs": 5, "opt": "adamw", "weight_decay": 0.05}
    for name, value in {**common, "smoothing": 0.1, "cutmix": 0.0, **options}.items():
        setattr(contents["args"], name, value)
    return imported(contents, folder).recipe


def test_training_goes_on_as_deit_trained(tmp_path: Path, nested: type[argparse.Namespace], capsys) -> None:
    recipe = deit_recipe(tmp_path, nested, sched="cosine", mixup=0.8)
    assert isinstance(recipe.data, ImageData)
    schedule, mixing = recipe.schedule, recipe.data.mixing
    assert (schedule.kind, schedule.lr, schedule.min_lr, schedule.epochs) == ("cosine-epochs", 1e-3, 1e-5, 300)
    assert (schedule.warmup_epochs, schedule.warmup_init) == (5, 1e-6)
    assert (recipe.optim.name, recipe.optim.weight_decay, recipe.optim.decay_vectors) == ("adamw", 0.05, False)
    assert mixing is not None
    assert (mixing.mixup, mixing.cutmix, mixing.smoothing) == (0.8, 0.0, 0.1)
    assert (
        "the state of the optimiser is not converted: training continues with a fresh one\n" in capsys.readouterr().out
    )


def test_training_goes_on_without_mixing(tmp_path: Path, nested: type[argparse.Namespace], capsys) -> None:
    recipe = deit_recipe(tmp_path, nested, sched="step", mixup=0.0)
    assert (recipe.schedule.kind, recipe.schedule.lr) == ("constant", 1e-3)
    assert isinstance(recipe.data, ImageData)
    assert (recipe.data.mixing, recipe.train.smoothing) == (None, 0.1)
    assert "with a fresh one, at a constant learning rate\n" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_an_imported_pyramid_is_exported(form: str, tmp_path: Path, nested: type[argparse.Namespace]) -> None:
    """Its config does not say how large images are, but what was imported does."""
    pytest.importorskip("onnxscript" if form == "onnx" else "torch")
    imported(library_images(sample(LIBRARY, "model_pvt_*"), nested), tmp_path)
    out = tmp_path / "exported"
    assert command(["export", str(tmp_path / "run"), "--to", form, "--out", str(out)]) == 0
    (images,) = json.loads((out / "export.json").read_text())["parts"]["model"]["inputs"]
    assert images["shape"] == ["batch", 3, 64, 64]


def test_the_name_says_what_the_options_do_not() -> None:
    """evit_tiny_p8 has patches of 8 pixels and heads of 64 channels; pvt_nano2 twice the heads of pvt_nano."""
    options = {"attn_name": "softmax", "attn_args": {}, "patch_size": 16, "num_heads": None}
    wide = {"head.weight": torch.zeros(10, 192), "pos_embed": torch.zeros(1)}
    found = evit_options("evit_tiny_p8", options, wide, 224)
    assert (found["patch_size"], found["num_heads"], found["no_pos_emb"]) == (8, 3, False)
    stages = {f"patch_embed{stage}.proj.weight": torch.zeros(8, 3, 3, 3) for stage in range(1, 5)}
    assert pyramid_options("pvt_nano", options, stages)["num_heads"] == [1, 2, 5, 8]
    assert pyramid_options("pvt_nano2", options, stages)["num_heads"] == [2, 4, 10, 16]


def test_images_are_classified_as_they_were(tmp_path: Path, nested: type[argparse.Namespace], capsys) -> None:
    """The command's answer is the model's, for the centre of an image, normalised as DeiT does."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    fixture = sample(LIBRARY, "model_evit_*")
    model = imported(library_images(fixture, nested), tmp_path).model
    size = fixture.config["input_size"]
    side = size if size <= 32 else int(size / 0.875)  # larger images lose their edges, and are not resized
    image = np.random.default_rng(0).integers(0, 256, (3, side, side), dtype=np.uint8)
    edge = round((side - size) / 2)
    shown = torch.from_numpy(image)[:, edge : edge + size, edge : edge + size]
    np.save(tmp_path / "image.npy", image)
    capsys.readouterr()
    assert command(["classify", str(tmp_path / "run"), str(tmp_path / "image.npy")]) == 0
    options = AugmentOptions()
    mean, std = (torch.tensor(values)[:, None, None] for values in (options.mean, options.std))
    with torch.no_grad():
        expected = model(((shown / 255 - mean) / std)[None]).logits.softmax(-1)[0]
    best = int(expected.argmax())
    assert f"image.npy: {best} {100 * float(expected[best]):.1f} %" in capsys.readouterr().out


def test_an_imported_classifier_is_evaluated_and_trained_further(
    tmp_path: Path, nested: type[argparse.Namespace], capsys
) -> None:
    """Five epochs are done; the sixth is one update of the imported weights."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    fixture = sample(LIBRARY, "model_evit_*")
    before = imported(library_images(fixture, nested), tmp_path).model.state_dict()
    size, run = fixture.config["input_size"], tmp_path / "run"
    draw = np.random.default_rng(0)
    for split in ("train", "valid"):
        images = draw.integers(0, 256, (16, 3, size, size), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=images, labels=np.arange(16) % 10)
    files = f"{{train: [{tmp_path}/train.npz], valid: [{tmp_path}/valid.npz]}}"
    card = model_card(load_trained(run).model, "", load_trained(run))
    assert "The model was imported from efficient-attention, evit_test with:" in card
    assert not any(words in card for words in ("trained", "## Data", "data/train", "after 0 updates"))
    assert command(["evaluate", str(run), f"data.images={files}", "--split", "valid"]) == 0
    assert "16 samples, 0 lost" in capsys.readouterr().out
    words = ["train", str(run / "recipe.yaml"), "--out", str(run), f"data.images={files}", "train.epochs=6"]
    assert command(words) == 0
    after = load_trained(run, "last")
    card = model_card(after.model, "", after)
    assert "was imported from efficient-attention, evit_test and trained further with:" in card
    assert "## Data" in card
    assert "after 1 updates" in card
    assert after.update == 1
    moved = max(float((after.model.state_dict()[name] - value).abs().max()) for name, value in before.items())
    assert 0 < moved < 1e-3


def test_classes_have_the_names_that_lie_beside_the_checkpoint(
    tmp_path: Path, nested: type[argparse.Namespace], capsys
) -> None:
    contents = library_images(sample(LIBRARY, "model_evit_*"), nested)
    names = [f"kind of {number}" for number in range(len(contents["model"]["head.weight"]))]
    (tmp_path / "classes.txt").write_text("\n".join(names[1:]) + "\n")
    assert f"has {len(names) - 1} names, but the model has {len(names)} classes" in refused(contents, tmp_path, capsys)
    (tmp_path / "classes.txt").write_text("\n".join(names) + "\n")
    assert imported(contents, tmp_path).inputs["classes"] == names


def test_a_classifier_without_options_is_refused(tmp_path: Path, capsys) -> None:
    state = sample(LIBRARY, "model_evit_*").under("state.")
    assert "args have no attn_name" in refused({"model": state}, tmp_path, capsys)


# ---------------------------------------------------------------------- Linformer


def write_crybot(fixture: Fixture, folder: Path) -> dict[str, Any]:
    config = {key: fixture.config[key] for key in ("model", "dataset")}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return {"model_state_dict": fixture.under("weights."), "optimizer_state_dict": {}, "callbacks_state_dict": []}


@pytest.mark.parametrize("path", found(LINFORMER, "crybot_*_encdec"))
def test_a_translation_model_of_crybot(path: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    fixture = load(path)
    loaded = imported(write_crybot(fixture, tmp_path), tmp_path)
    model, bos, eos = loaded.model, fixture.config["bos"], fixture.config["eos"]
    assert isinstance(model, Seq2Seq)
    source, padding = fixture["in.src"], fixture["in.src_mask"] == 0
    given = fixture["in.tgt"][:, :-1]
    read = (fixture["in.tgt_mask"][:, :-1] != 0) & (given != eos)
    first = torch.where(given == bos, eos, given)  # a target begins with eos here
    with torch.no_grad():
        log_probs = model(source, first, source_padding=padding, target_padding=~read).logits.log_softmax(-1)
    assert_close(log_probs[read], fixture["out.log_probs"][read], OUTPUT_TOLERANCE, "log-probabilities")

    golden = fixture["out.generated"]
    lines = [
        " ".join(str(token) for token in row[~gone][:-1].tolist()) for row, gone in zip(source, padding, strict=True)
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    capsys.readouterr()
    words = ["--max-len-b", str(golden.shape[1])]
    assert command(["translate", str(tmp_path / "run"), *words]) == 0
    said = [[int(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
    special = {bos, fixture.config["pad"], eos}
    assert said == [[token for token in row if token not in special] for row in golden.tolist()]
    check_goes_on(tmp_path / "run", ["0 5 6 7", "6 5"])


def test_crybot_needs_its_config(tmp_path: Path, capsys) -> None:
    contents = write_crybot(sample(LINFORMER, "crybot_*_encdec"), tmp_path)
    (tmp_path / "other.yaml").write_text("model: {n_heads: 16}\n")
    assert "several configs with different numbers of heads" in refused(contents, tmp_path, capsys)
    for path in tmp_path.glob("*.yaml"):
        path.unlink()
    assert "has no YAML config with model.n_heads" in refused(contents, tmp_path, capsys)


def test_a_checkpoint_of_crybot_from_weights_and_biases_is_evaluated(tmp_path: Path) -> None:
    """With the config as `wandb pull` puts it beside the checkpoint, and a dump of pretokenize_dataset.py."""
    fixture = sample(LINFORMER, "crybot_*_encdec")
    contents = write_crybot(fixture, tmp_path)
    sections = yaml.safe_load((tmp_path / "config.yaml").read_text())
    stored = {
        "_wandb": {"value": {"cli_version": "0.18"}},
        **{name: {"value": part} for name, part in sections.items()},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    imported(contents, tmp_path)
    np.savez(tmp_path / "test.npz", src=fixture["in.src"].numpy(), tgt=fixture["in.tgt"].numpy())
    split = f"data.splits.test={{files: [{tmp_path / 'test.npz'}], columns: [src, tgt]}}"
    assert command(["evaluate", str(tmp_path / "run"), split, "--resamples", "1"]) == 0
    found = json.loads((tmp_path / "run/evaluation-test.json").read_text())
    expected, scored = fixture["in.tgt"][:, 1:], fixture["in.tgt_mask"][:, 1:] != 0
    log_probs = fixture["out.log_probs"].gather(-1, expected[..., None])[..., 0][scored]
    assert found["metrics"]["ppl"]["value"] == pytest.approx(math.exp(-log_probs.mean()), rel=1e-5)


def test_a_model_of_crybot_reads_and_writes_text(tmp_path: Path, capsys) -> None:
    """With the tokenizer.json that it was trained with, BLEU is that of words and perplexity is the original's."""
    fixture = sample(LINFORMER, "crybot_*_encdec")
    size = fixture["weights.linear.weight"].shape[0]
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, size)}}
    engine = Engine(WordLevel(words, unk_token="<unk>"))
    engine.pre_tokenizer = WhitespaceSplit()
    engine.save(str(tmp_path / "tokenizer.json"))
    torch.save(write_crybot(fixture, tmp_path), tmp_path / "checkpoint.pt")
    run = str(tmp_path / "run")
    options = ["--out", run, "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert command(["import", str(tmp_path / "checkpoint.pt"), *options]) == 0
    assert "as ids" not in capsys.readouterr().out
    source, target = (
        [" ".join(f"w{token}" for token in row if token > 3) for row in fixture[name].tolist()]
        for name in ("in.src", "in.tgt")
    )
    rows = [f"{right},{left}\n" for left, right in zip(source, target, strict=True)]
    (tmp_path / "test.csv").write_text("".join(["de,en\n", *rows]))
    split = f"data.splits.test={{files: [{tmp_path / 'test.csv'}], columns: [en, de]}}"
    assert command(["evaluate", run, split, "--resamples", "1"]) == 0
    found = json.loads((tmp_path / "run/evaluation-test.json").read_text())
    expected, scored = fixture["in.tgt"][:, 1:], fixture["in.tgt_mask"][:, 1:] != 0
    log_probs = fixture["out.log_probs"].gather(-1, expected[..., None])[..., 0][scored]
    assert found["metrics"]["ppl"]["value"] == pytest.approx(math.exp(-log_probs.mean()), rel=1e-5)
    said = (tmp_path / "run/evaluation-test.hyp.txt").read_text().split()
    assert said
    assert not any(word.isdigit() for word in said)


def test_an_encoder_alone_is_refused(tmp_path: Path, capsys) -> None:
    contents = write_crybot(sample(LINFORMER, "crybot_*_encdec"), tmp_path)
    state = contents["model_state_dict"]
    contents["model_state_dict"] = {name: state[name] for name in state if not name.startswith("model.decoder.")}
    assert "only its translation models are supported" in refused(contents, tmp_path, capsys)


# ---------------------------------------------------------------------- what cannot be a run

HOSTS = [
    *[(case, "the Long Range Arena") for case in found(PRIMAL, "lra_primal*")],
    *[(case, "PrimalAttention_TimeSeries") for case in found(PRIMAL, "ts_primal*")],
    *[(case, "PrimalAttention_RL") for case in found(PRIMAL, "rl_attn*")],
]


@pytest.mark.parametrize(("path", "what"), [pytest.param(*case.values, what, id=f"{case.id}") for case, what in HOSTS])
@pytest.mark.parametrize("key", ["model", "model_state_dict"])
def test_other_tasks_are_refused_by_name(path: Path, what: str, key: str, tmp_path: Path, capsys) -> None:
    weights = load(path).under("weights.")
    state = {f"blocks.0.{name}": value for name, value in weights.items()} if "_RL" in what else weights
    args = argparse.Namespace(arch="some", task="other")
    said = refused({key: state, "args": args}, tmp_path, capsys)
    assert f"this is a checkpoint of {what}" in said
    assert "can be imported" in said
