"""The recipes of the package: all parse and build, the large ones have the papers' sizes, mistakes are one line."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from subquad.cli.main import run
from subquad.models import Model, build_from_config, preset
from subquad.recipes import FOLDER
from subquad.tasks.image_classification import ImageData
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.schedules import Schedule

ROOT = Path(__file__).parents[2]
RECIPES = {str(path.relative_to(FOLDER).with_suffix("")): path for path in sorted(FOLDER.rglob("*.yaml"))}
LARGE = [name for name in RECIPES if "/" not in name]
MILLION = 1e6

COUNTS = {
    "wikitext103_softmax_16": 246_933_504,
    "wikitext103_causal_eva_16": 247_471_104,
    "wikitext103_causal_eva_32": 449_548_288,
    "wmt14_en_de_eva_32": 60_966_784,
    "wmt14_en_de_lara_8": 60_967_168,
    "wmt14_en_de_lara_16": 60_967_168,
    "wmt14_en_de_lara_32": 60_967_168,
    # symbols, blocks (attention without biases but for its output, feed-forward network, norms), norm, head
    "listops_lra": 19 * 512 + 6 * (4 * 512**2 + 512 + 2 * 512 * 2048 + 2560 + 2048) + 1024 + 513 * 2048 + 2049 * 10,
    "imdb_bytes_lra": 260 * 256 + 4 * (4 * 256**2 + 256 + 2 * 256 * 1024 + 1280 + 1024) + 512 + 257 * 1024 + 1025 * 2,
    # a pixel's three colours, positions, the block, norm, head
    "cifar10_pixels_lra": 4 * 32 + 1024 * 32 + 4 * 33 * 32 + 2 * 32 * 64 + 96 + 128 + 64 + 33 * 10,
} | {
    f"imagenet_{model}_{mechanism}": count
    for model, counts in {
        "evit_tiny_p16": (5_717_032, 5_720_524, 5_717_032, 5_819_944, 5_823_436),
        "evit_tiny_p8": (5_719_336, 5_722_828, 5_719_336, 5_822_248, 5_825_740),
        "evit_small_p16": (22_049_896, 22_056_880, 22_049_896, 22_152_808, 22_159_792),
        "pvt_v2_b3": (36_011_496, 36_031_090, 36_011_496, 39_892_328, 36_087_090),
    }.items()
    for mechanism, count in zip(("softmax", "local", "performer", "lara", "eva"), counts, strict=True)
}
# millions of parameters that are not words: of the papers' tables
CONVOLUTIONS = {
    "iwslt14_de_en": {"dynamicconv": 27.4, "lightconv": 26.8},
    "wmt16_en_de": {"dynamicconv": 179.7, "lightconv": 175.3},
    "wmt14_en_fr": {"dynamicconv": 179.7, "lightconv": 175.3},
    "wmt17_zh_en": {"dynamicconv": 179.7, "lightconv": 175.3},
}
# by hand, as the papers do not say: symbols and positions, two layers of attention, feed-forward network and norms
ATTENTION, NORM = 4 * 128 * 129, 2 * 128
SWIGLU_MODEL = (20 + 1024) * 128 + 2 * (ATTENTION + 3 * 128 * 352 + 2 * NORM) + NORM + 20 * 129
RECALL = {
    "zoology_associative_recall": (8196 + 512) * 128 + 2 * (ATTENTION + 2 * 128 * 129 + 2 * NORM) + NORM,
    "mad_selective_copying": SWIGLU_MODEL,
    "mad_fuzzy_recall": SWIGLU_MODEL,
}
AS_PRESET = {
    "linformer_roberta_base": "linformer_roberta_base",
    "wikitext103_primal": "primal_lm",
    "wmt14_linformer_k32": "linformer_translation_k32",
    "wmt14_linformer_k64": "linformer_translation_k64",
    "wmt14_linformer_vanilla": "vanilla_translation",
}


def built(recipe: Recipe) -> Model:
    with torch.device("meta"):
        return build_from_config(recipe.model_data({}))


@pytest.mark.parametrize("name", RECIPES)
def test_parses_and_builds(name: str) -> None:
    recipe = read_recipe(RECIPES[name])
    assert built(recipe).parameter_count() > 0
    Schedule(recipe.schedule, recipe.train.updates, recipe.train.epochs).learning_rate(0)
    # what a run stores of it is a recipe again
    assert Recipe.parse("stored", yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json")))) == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_begins_with_what_it_is(name: str) -> None:
    first = RECIPES[name].read_text().split("task:")[0].splitlines()
    assert first, "a recipe begins with a comment"
    assert all(line.startswith("# ") for line in first)
    if name in LARGE:
        text = " ".join(first)
        assert "README" in text, "it names the command that it is the equivalent of"
        assert "Data:" in text
        assert "differs:" in text


@pytest.mark.parametrize(("name", "count"), [*COUNTS.items(), *RECALL.items()])
def test_counts_of_the_papers(name: str, count: int) -> None:
    assert built(read_recipe(RECIPES[name])).parameter_count() == count


@pytest.mark.parametrize(("pair", "millions"), CONVOLUTIONS.items())
def test_counts_of_the_convolutions(pair: str, millions: dict[str, float]) -> None:
    for mechanism, expected in millions.items():
        model = built(read_recipe(RECIPES[f"{pair}_{mechanism}"]))
        words = ("source.", "target.", "head.weight")
        rest = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(words))
        assert rest / MILLION == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(("name", "of"), AS_PRESET.items())
def test_counts_of_presets(name: str, of: str) -> None:
    with torch.device("meta"):
        assert built(read_recipe(RECIPES[name])).parameter_count() == build_from_config(preset(of)).parameter_count()


def test_every_large_recipe_has_a_known_size() -> None:
    known = {
        *COUNTS,
        *RECALL,
        *AS_PRESET,
        *(f"{pair}_{kind}" for pair, kinds in CONVOLUTIONS.items() for kind in kinds),
    }
    assert set(LARGE) - known == {"wmt14_en_de_eva_8", "wmt14_en_de_eva_16"}  # T5 tables of 16 rows instead of 24


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What it prints; it fails exactly when something that the recipe reads is not as it should be."""
    code = run(["train", *words, "--dry-run"])
    out, err = capsys.readouterr()
    wrong = [line.split("data: ")[1].split() for line in out.splitlines() if "data: " in line and "found" not in line]
    assert (code, err.count("\n")) == ((1, 1) if wrong else (0, 0))
    assert all(f"{name}: {' '.join(why)}" in err for name, *why in wrong if name != "target")
    return out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("small/digits", ["64 images"]),
        ("small/cifar10_lara", ["64 images", "554,890", "missing: data/cifar10/train_batch_1.webp"]),
        (
            "small/multi30k_lightconv",
            ["64 x 64 tokens", "2,217,408 with a vocabulary of 8,000;", "missing: data/multi30k/train.en.gz"],
        ),
        ("small/phrases", ["with a vocabulary of 2,000; the data may give another"]),
        ("small/wikitext2_lightconv", ["16 x 256 tokens", "missing: data/wikitext2/train.txt.gz"]),
        ("imagenet_evit_tiny_p16_eva", ["128 images", "5,823,436", "missing: data/imagenet/train"]),
        ("iwslt14_de_en_lightconv", ["missing: data/iwslt14.tokenized.de-en/code"]),
        ("wmt14_linformer_k32", ["missing: data/bart/tokenizer.json"]),
    ],
)
def test_dry_run(
    name: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = dry_run(capsys, str(RECIPES[name]))
    for words in [*expected, "training memory"]:
        assert words in shown
    assert not list(tmp_path.iterdir())  # nothing is written


def test_dry_run_finds_data_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").mkdir()
    changes = [f"data.images.train={tmp_path / 'train'}", f"data.images.valid={tmp_path / 'val'}"]
    shown = dry_run(capsys, str(RECIPES["imagenet_evit_tiny_p16_softmax"]), *changes)
    assert [line.split()[-1] for line in shown.splitlines() if "data: " in line] == ["found", str(tmp_path / "val")]


def test_dry_run_counts_the_classes_that_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, change = str(RECIPES["imagenet_evit_tiny_p16_softmax"]), f"data.images.train={tmp_path / 'train'}"
    found = re.search(r"parameters +([\d,]+)\n", dry_run(capsys, recipe, change))  # of the preset's 1,000 classes
    assert found is not None
    for name in ("cat", "dog", ".hidden"):
        (tmp_path / "train" / name).mkdir(parents=True)
    fewer = int(found[1].replace(",", "")) - 998 * (192 + 1)
    assert f"{fewer:,} with 2 classes\n" in dry_run(capsys, recipe, change)


def test_cutoffs_above_the_vocabulary_name_their_options() -> None:
    small = read_recipe(RECIPES["wikitext103_softmax_16"]).model_data({"vocab": 50_000})
    with pytest.raises(
        ValueError, match=r"60000, must be below.* 50000: set model.embedding.cutoffs and model.head.cutoffs"
    ):
        build_from_config(small)


def test_dry_run_reads_the_first_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("hello\n")
    pair = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    changes = [f"data.splits.train={pair[:1]}", f"data.splits.valid={pair}", f"data.splits.test={pair}"]
    shown = dry_run(capsys, str(RECIPES["small/multi30k_lightconv"]), *changes)
    assert f"2 text files are needed (source, target) or one table (format=tsv, ...); got {pair[0]}" in shown
    assert shown.count(" found") == 2


def test_dotted_changes() -> None:
    recipe = read_recipe(
        RECIPES["small/wikitext2_eva"],
        ["train.updates=7000", "model.decoder.mixer.window=16", "optim.betas=[0.9, 0.95]", "train.precision=bfloat16"],
    )
    assert (recipe.train.updates, recipe.optim.betas, recipe.train.precision) == (7000, (0.9, 0.95), "bfloat16")
    assert recipe.model["decoder"]["mixer"] == {"name": "eva", "window": 16, "chunk_size": 8, "relative": "t5"}
    recipe = read_recipe(RECIPES["small/wikitext2_eva"], ["model.decoder.mixer=performer"])
    assert recipe.model["decoder"]["mixer"] == "performer"
    assert recipe.model["decoder"]["layers"] == 4
    recipe = read_recipe(RECIPES["small/cifar10_eva"], ["data.mixing={}", "train.smoothing=0"])
    assert isinstance(recipe.data, ImageData)
    assert recipe.data.mixing is not None


def test_a_change_with_a_colon_replaces_a_whole_section() -> None:
    path, folder = RECIPES["iwslt14_de_en_dynamicconv"], {"path": "data-bin/iwslt14", "languages": ["de", "en"]}
    recipe = read_recipe(path, [f"data:={{fairseq: {folder}}}"])
    assert recipe.data.model_dump(mode="json", exclude_defaults=True) == {"fairseq": folder}
    assert recipe.train == read_recipe(path).train
    recipe = read_recipe(path, ["data.tokenizer:={kind: bpe, vocab_size: 800}", "data.tokenizer.vocab_size=900"])
    assert recipe.data.model_dump(exclude_defaults=True)["tokenizer"] == {"vocab_size": 900}
    assert recipe.data.model_dump()["splits"] == read_recipe(path).data.model_dump()["splits"]
    recipe = read_recipe(path, ["schedule:={kind: constant, lr: 0.5}"])
    assert recipe.schedule.model_dump(exclude_defaults=True) == {"kind": "constant", "lr": 0.5}


def test_what_cannot_be_merged_says_how_to_replace_it() -> None:
    path = RECIPES["iwslt14_de_en_dynamicconv"]
    for change, replacement in (
        ("data.tokenizer.kind=bpe", "does not accept codes; it accepts vocab_size; data.tokenizer:={kind: bpe}"),
        ("data={folder: a, fairseq: b}", "data:={fairseq: ...} on a command line replaces the whole section"),
    ):
        with pytest.raises(ValueError, match=re.escape(replacement)):
            read_recipe(path, [change])


def test_other_data_takes_the_place_of_what_the_recipe_has() -> None:
    """Whatever else the recipe says about the data stays, such as max_length."""
    path = RECIPES["iwslt14_de_en_dynamicconv"]
    recipe = read_recipe(path, ["data.fairseq=data-bin", "data.max_length=77"])
    assert recipe.data.model_dump(exclude_defaults=True) == {"fairseq": {"path": "data-bin"}, "max_length": 77}
    recipe = read_recipe(RECIPES["small/phrases"], [{"data": {"splits": {"train": ["a", "b"]}}}])
    assert recipe.data.model_dump(exclude_defaults=True)["splits"]["train"]["files"] == ("a", "b")
    assert recipe.data.model_dump()["embedded"] is None
    assert recipe.data.model_dump()["tokenizer"] == read_recipe(RECIPES["small/phrases"]).data.model_dump()["tokenizer"]


def test_the_originals_name_of_a_pyramid_is_accepted() -> None:
    assert preset("pvt_medium2") == preset("pvt_v2_b3")
    recipe = read_recipe(RECIPES["imagenet_pvt_v2_b3_softmax"], ["model.preset=pvt_medium2"])
    assert recipe.model_data({}) == read_recipe(RECIPES["imagenet_pvt_v2_b3_softmax"]).model_data({})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("small/phrases", "train.updatess=5", "did you mean 'updates'"),
        ("small/phrases", "scheduler.lr=1", "did you mean 'schedule'"),
        ("small/phrases", "train.updates=many", "train.updates: "),
        ("small/phrases", "train.updates=0", "greater than or equal to 1"),
        ("small/phrases", "train.updates", "write NAME=VALUE, such as train.updates=100"),
        ("small/phrases", "train..updates=3", "write NAME=VALUE, such as train.updates=100"),
        ("small/phrases", "train.updates=[3", "not YAML"),
        ("small/phrases", "data:={folder:", "put the whole change into quotation marks"),
        ("small/phrases", "model.encoder.mixer=evo", "did you mean 'eva'"),
        ("small/phrases", "model.encoder.layrs=3", "did you mean 'layers'"),
        ("small/phrases", "model.preset=translation_smal", "did you mean 'translation_small'"),
        ("small/phrases", "model.decoder.mixer=lara", "causal"),
        ("small/phrases", "task=language-model", "trains models of kind language-model, not encoder-decoder"),
        ("small/recall_128", "model.kind=[]", "trains models of kind language-model, not []"),
        ("small/phrases", "task=translating", "task: "),
        ("small/phrases", "data={folder: x, fairseq: y}", "give one of embedded, folder, splits and fairseq"),
        ("small/phrases", "data.repeated=3", "data.repeated has no meaning for task translation"),
        ("small/phrases", "schedule.period=3", "has no period"),
        ("small/phrases", "update_freq=4", "fairseq's update_freq is train.accumulate here"),
        ("small/phrases", "train.update_freq=4", "fairseq's update_freq is train.accumulate here"),
        ("small/phrases", "train.ddp_backend=x", "train.sharded chooses the engine"),
        ("small/phrases", "optim.clip_grad=1", "efficient-attention's clip_grad is optim.clip here"),
        ("small/phrases", "training.epochs=4", "this is a config of crybot's program; `subquad recipes --from"),
        ("small/phrases", "task=masked_lm", "did you mean 'masked-language-model'?"),
        ("small/phrases", "schedule.kind=polynomial_decay", "did you mean 'linear'?"),
        ("small/phrases", "model.encoder.mixer=causal_eva", "did you mean 'eva'?"),
        ("small/phrases", "model.encoder.mixer={name: eva, adaptive: no-ln}", "did you mean 'linear'?"),
        ("small/phrases", "model.encoder.mixer={name: eva, window_size: 8}", "window_size is window here"),
        ("small/phrases", "model.encoder.mixer={name: lara, weights: mis-bh}", "did you mean 'bh'?"),
        ("small/cifar10_eva", "data.augment.crop=some", "data.augment.crop: "),
        ("small/cifar10_eva", "data.images.valid=x", "has one already"),
    ],
)
def test_mistakes_are_one_clear_line(name: str, change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(RECIPES[name]), change, "--dry-run"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("subquad: error: ")
    assert message in lines[0]
    assert "defect" not in lines[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [("task: [", "is not YAML"), ("just words", "holds no recipe"), (None, "there is no recipe")],
)
def test_files_that_hold_no_recipe(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_the_recipe_of_the_guide_is_one() -> None:
    guide = (ROOT / "docs" / "training.md").read_text()
    (block,) = re.findall(r'^```yaml title="my.yaml"\n(.*?)^```$', guide, re.DOTALL | re.MULTILINE)
    recipe = Recipe.parse("guide", yaml.safe_load(block))
    with torch.device("meta"):
        build_from_config(recipe.model_data({}))
