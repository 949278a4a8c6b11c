"""`subquad import`: checkpoints of fairseq become runs, and what is not a checkpoint is refused."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from subquad.cli.main import run as command
from subquad.data.tokenizers.fairseq import MosesTokenizer, post_process
from subquad.interop.checkpoints import convert_checkpoint, import_checkpoint
from subquad.interop.checkpoints.fairseq.models import PAD, to_current_layout
from subquad.interop.checkpoints.fairseq.settings import DECODE
from subquad.interop.checkpoints.run import TextFiles
from subquad.interop.checkpoints.safe_pickle import read_pickle
from subquad.models import LanguageModel, Seq2Seq
from subquad.train.checkpoint import load_checkpoint
from subquad.train.run import load_trained
from tests.originals.checkpoints import translations
from tests.originals.fairseq_models import LOG_PROBABILITY_TOLERANCE, cuts_filters
from tests.originals.files import FOLDER, OUTPUT_TOLERANCE, assert_close, load, padding_of

pytestmark = pytest.mark.usefixtures("preloaded_programs")

GOLDEN = Path(__file__).parents[1] / "golden" / "fairseq"
CHECKPOINTS = GOLDEN / "ckpt"
MAIN, LEGACY = CHECKPOINTS / "main_dynamic_glu.pt", CHECKPOINTS / "legacy_dynamic_glu.pt"
MODELS = sorted(
    path
    for path in (FOLDER / "fairseq").glob("*.safetensors")
    if path.name.startswith(("model_", "lm_")) and not path.stem.endswith("_grads")
)
BEFORE_BPE = "#version: 0.2\n1 0</w>\n1 1</w>\n1 2</w>\n1 3</w>\n"
CODES = BEFORE_BPE + "".join(f"{letter} {number}</w>\n" for letter in "st" for number in range(14))
"""Codes that leave the p of a word such as pt3 alone: p@@ t3."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a checkpoint in today's layout."""
    folder = tmp_path_factory.mktemp("imported") / "run"
    assert command(["import", str(MAIN), "--out", str(folder)]) == 0
    return folder


def golden_hypotheses() -> list[list[dict[str, Any]]]:
    return json.loads((CHECKPOINTS / "generation.json").read_text())["dynamic"]["hypos"]


def changed(path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with changes, its dictionaries beside it."""
    contents = read_pickle(path)
    change(contents)
    for name in ("dict.src.txt", "dict.tgt.txt"):
        (tmp_path / name).write_bytes((CHECKPOINTS / name).read_bytes())
    torch.save(contents, tmp_path / "changed.pt")
    return tmp_path / "changed.pt"


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line that says why; no run is left behind."""
    out = Path(words[words.index("--out") + 1])
    assert command(["import", *map(str, words)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not (out / "recipe.yaml").exists()
    return said


# ---------------------------------------------------------------------- models


def dictionary(path: Path, size: int) -> None:
    path.write_text("".join(f"w{number} 1\n" for number in range(size - 4)))


def write_checkpoint(folder: Path, fixture: Any, layout: str) -> Path:
    """A golden model as fairseq would have saved it, with dictionaries of its size beside it."""
    state = fixture.under("state.")
    translates = any(name.startswith("encoder.") for name in state)
    family = "lightconv" if any(".linear1." in name for name in state) else "transformer"
    names = {"arch": family if translates else f"{family}_lm", "lr": [0.1]}
    task = {"task": "translation" if translates else "language_modeling", "source_lang": "de", "target_lang": "en"}
    if translates:
        for side, language in (("encoder", "de"), ("decoder", "en")):
            dictionary(folder / f"dict.{language}.txt", len(state[f"{side}.embed_tokens.weight"]))
    else:
        one, bands = "embed_tokens.weight", r"embed_tokens\.embeddings\.\d+\.0\.weight"
        tables = [value for name, value in state.items() if name.endswith(one) or re.search(bands, name)]
        dictionary(folder / "dict.txt", sum(len(table) for table in tables))
    path = folder / "model.pt"
    if layout == "args":
        args = argparse.Namespace(**{**names, **task, **fixture.config})
        torch.save({"args": args, "model": state}, path, _use_new_zipfile_serialization=False)
    else:
        model = argparse.Namespace(**{**names, **fixture.config})
        groups = {"task": {"_name": task.pop("task"), **task}, "optimization": {"lr": [0.1]}, "bpe": None}
        torch.save({"args": None, "cfg": {"_name": None, "model": model, **groups}, "model": state}, path)
    return path


@pytest.mark.parametrize("layout", ["args", "cfg"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_an_imported_model_computes_what_it_always_computed(path, layout, tmp_path) -> None:
    fixture = load(path)
    import_checkpoint(write_checkpoint(tmp_path, fixture, layout), tmp_path / "run")
    model = load_trained(tmp_path / "run").model
    source = fixture["src_tokens"]
    with torch.no_grad():
        if isinstance(model, Seq2Seq):
            target = fixture["prev_output_tokens"]
            logits = model(source, target, source_padding=padding_of(source)).logits
            key, there = (
                "logits_incremental" if cuts_filters(fixture.config, target.shape[1]) else "logits",
                target != PAD,
            )
            assert_close(logits[there], fixture[key][there], OUTPUT_TOLERANCE, "logits")
            return
        assert isinstance(model, LanguageModel)
        logits, there = model(source, padding=padding_of(source)).logits, source != PAD
    if "logits" in fixture:
        assert_close(logits[there], fixture["logits"][there], OUTPUT_TOLERANCE, "logits")
    else:
        golden = fixture["log_probs"][there]
        asked = fixture["target"][there][:, None]
        ours = logits.log_softmax(-1)[there]
        assert_close(ours.gather(1, asked), golden.gather(1, asked), LOG_PROBABILITY_TOLERANCE, "log-probabilities")


def test_translations_of_a_process_are_fairseqs(run) -> None:
    words = ["translate", str(run), "--beam", "4", "--nbest", "4", "--max-len-b", "40", "--scores"]
    with (CHECKPOINTS / "test.src").open("rb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "subquad.cli.main", *words], stdin=stream, capture_output=True, check=True
        )
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    golden = [(number, found) for number, hypotheses in enumerate(golden_hypotheses(), 1) for found in hypotheses]
    for (number, score, text), (line, found) in zip(rows, golden, strict=True):
        assert int(number) == line
        assert post_process(text, "subword_nmt") == found["text"]
        assert abs(float(score) - found["score"]) < 2e-4


def test_the_recipe_decodes_as_fairseq_does_by_default(run) -> None:
    theirs = read_pickle(MAIN)["cfg"]["generation"]
    decode = yaml.safe_load((run / "recipe.yaml").read_text())["decode"]
    names = {"unk_penalty": "unkpen"}
    assert {name: decode[name] for name in DECODE} == {name: theirs[names.get(name, name)] for name in DECODE}
    assert (decode["temperature"], decode["no_repeat_ngram"]) == (theirs["temperature"], theirs["no_repeat_ngram_size"])


def test_the_recipe_trains_as_the_checkpoint_says(run) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (recipe["optim"]["name"], recipe["optim"]["betas"], recipe["optim"]["weight_decay"]) == (
        *("adam", [0.9, 0.98]),
        1e-4,
    )
    schedule = recipe["schedule"]
    assert (schedule["kind"], schedule["lr"], schedule["warmup_updates"]) == ("inverse-sqrt", 0.004, 40)
    assert (recipe["train"]["updates"], recipe["train"]["smoothing"]) == (240, 0.1)
    assert recipe["train"]["budget"]["max_tokens"] == 600


# ---------------------------------------------------------------------- training goes on


def more_data() -> list[str]:
    files = f"[{CHECKPOINTS / 'test.src'}, {CHECKPOINTS / 'test.tgt'}]"
    return [f"data.splits.{split}={files}" for split in ("train", "valid")]


def with_moments(contents: dict[str, Any]) -> None:
    """The optimiser's state as fairseq numbers it: parameters in the model's order, unused ones without a state."""
    generator = torch.Generator().manual_seed(1)
    names = [name for name in contents["model"] if not name.endswith("version")]
    used = {number: contents["model"][name] for number, name in enumerate(names) if "conv_bias" not in name}
    moments = {
        number: {
            "step": 240,
            "exp_avg": 1e-3 * torch.randn(value.shape, generator=generator),
            "exp_avg_sq": 1e-4 * torch.rand(value.shape, generator=generator),
        }
        for number, value in used.items()
    }
    contents["last_optimizer_state"] = {"state": moments, "param_groups": [{"params": list(range(len(names)))}]}


def test_training_goes_on_with_the_optimisers_state(tmp_path, capsys) -> None:
    path, run = changed(MAIN, tmp_path, with_moments), tmp_path / "run"
    assert command(["import", str(path), "--out", str(run)]) == 0
    assert "optimiser" not in capsys.readouterr().out
    before = load_checkpoint(run / "checkpoints" / "update-000000240")
    stored = read_pickle(path)
    names = [name for name in stored["model"] if not name.endswith("version")]
    cross = "decoder.layers.1.encoder_attn"
    for key in ("exp_avg", "exp_avg_sq"):
        parts = [
            stored["last_optimizer_state"]["state"][names.index(f"{cross}.{one}_proj.weight")][key] for one in "qkv"
        ]
        assert torch.equal(before.optimizer[f"{key}.decoder.blocks.1.cross.qkv.weight"], torch.cat(parts))
    assert {name.partition(".")[2] for name in before.optimizer} == before.model.keys()

    words = ["train", str(run / "recipe.yaml"), "--out", str(run), *more_data(), "schedule.lr=0.001"]
    assert command([*words, "train.updates=241"]) == 0
    after = load_checkpoint(run / "checkpoints" / "update-000000241")
    assert after.optimizer["step.head.weight"] == 241
    assert not torch.equal(after.model["head.weight"], before.model["head.weight"])
    assert after.state.metrics["loss"] < 0.3  # it was trained before: a model of nothing is above 3
    # what it was trained on here belongs to it now
    assert command([*words, "train.updates=242", "train.seed=5"]) == 1
    assert "train.seed differ" in capsys.readouterr().err
    assert command([*words, "train.updates=242"]) == 0

    own = ["train", str(run / "recipe.yaml"), *more_data(), "schedule.lr=0.001"]
    assert command([*own, "train.updates=243"]) == 0, "a run's own recipe goes on with it"
    assert (run / "checkpoints" / "update-000000243").is_dir()
    capsys.readouterr()
    assert command([*own, "train.updates=1", "schedule.warmup_updates=1", "--out", str(tmp_path / "other")]) == 0
    assert f"is a new run, with none of the weights of {run}; --out {run} goes on" in capsys.readouterr().err


def test_a_state_of_other_parameters_is_not_taken(tmp_path) -> None:
    def flat(contents: dict[str, Any]) -> None:
        row = torch.zeros(sum(value.numel() for value in contents["model"].values()))
        contents["last_optimizer_state"] = {"state": {0: {"step": 1, "exp_avg": row, "exp_avg_sq": row}}}

    found = convert_checkpoint(changed(MAIN, tmp_path, flat), TextFiles())
    assert not found.optimizer
    assert any("the state of the optimiser is not converted" in note for note in found.notes)


def test_an_imported_run_is_evaluated(run, tmp_path, capsys) -> None:
    files = f"[{CHECKPOINTS / 'test.src'}, {CHECKPOINTS / 'test.tgt'}]"
    words = ["evaluate", str(run), f"data.splits.test={files}", "--out", str(tmp_path / "found.json")]
    assert command([*words, "--resamples", "10"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["samples"], found["lost"], found["update"]) == (29, 0, 240)
    assert "bleu" in capsys.readouterr().out


@pytest.mark.nightly
def test_an_imported_run_is_exported(run, tmp_path) -> None:
    """The files are held against the model as they are written."""
    out = tmp_path / "exported"
    assert command(["export", str(run), "--to", "torch", "--out", str(out)]) == 0
    assert {"encoder.pt2", "step.pt2", "tokenizers"} <= {path.name for path in out.iterdir()}
    card = (out / "README.md").read_text()
    assert "The model was imported from fairseq, lightconv" in card
    assert "label_smoothing" not in card
    assert "smoothing: 0.1" in card
    assert not any(words in card for words in ("was trained", "## Data", "data/train", str(run.parent)))


def test_an_imported_language_model_is_used_as_any_other(tmp_path, capsys) -> None:
    path = write_checkpoint(tmp_path, load(GOLDEN / "lm_lightconv_dyn_glu.safetensors"), "args")
    run = tmp_path / "run"
    assert command(["import", str(path), "--out", str(run)]) == 0
    capsys.readouterr()
    assert command(["generate", str(run), "--prompt", "w1 w2", "--tokens", "4", "--greedy"]) == 0
    assert capsys.readouterr().out.startswith("w1 w2 w")
    (tmp_path / "text.txt").write_text("w3 w4 w5\nw6 w7\n" * 4)
    splits = [f"data.splits.{split}={tmp_path / 'text.txt'}" for split in ("train", "valid")]
    words = ["train", str(run / "recipe.yaml"), "--out", str(run), *splits, "train.updates=2", "schedule.lr=0.001"]
    assert command(words) == 0
    assert command(["evaluate", str(run), "--split", "valid", "--resamples", "10"]) == 0
    assert json.loads((run / "evaluation-valid.json").read_text())["update"] == 2


# ---------------------------------------------------------------------- dictionaries and codes


def test_text_goes_in_and_out_as_words_with_codes(tmp_path, capsys) -> None:
    path = changed(LEGACY, tmp_path, lambda _: None)
    (tmp_path / "code").write_text(CODES)
    assert command(["import", str(path), "--out", str(tmp_path / "run"), "--no-moses"]) == 0
    assert "codes" not in capsys.readouterr().out
    lines = (CHECKPOINTS / "test.src").read_text().splitlines()
    found = translations(load_trained(tmp_path / "run"), lines, beam=4)
    assert [best.text for (best,) in found] == [hypotheses[0]["text"] for hypotheses in golden_hypotheses()]


def test_text_is_split_by_moses_in_the_models_languages(tmp_path) -> None:
    pytest.importorskip("sacremoses")

    def german(contents: dict[str, Any]) -> None:
        contents["args"].source_lang, contents["args"].target_lang = "de", "en"

    codes = tmp_path / "some.codes"
    codes.write_text(CODES)
    texts = TextFiles(CHECKPOINTS / "dict.src.txt", CHECKPOINTS / "dict.tgt.txt", codes)
    found = convert_checkpoint(changed(LEGACY, tmp_path, german), texts).tokenizers
    for side, language in (("source", "de"), ("target", "en")):
        assert isinstance(found[side], MosesTokenizer)
        assert found[side].settings() == {"language": language}


def test_dictionaries_are_found_where_the_data_was(tmp_path, monkeypatch) -> None:
    path = changed(LEGACY, tmp_path, lambda _: None)
    (tmp_path / "data-bin").mkdir()
    for name in ("dict.src.txt", "dict.tgt.txt"):
        (tmp_path / name).rename(tmp_path / "data-bin" / name)
    monkeypatch.chdir(tmp_path)
    assert convert_checkpoint(path, TextFiles()).tokenizers["source"].size == 24


def test_a_missing_dictionary_is_named(tmp_path, capsys) -> None:
    path = changed(MAIN, tmp_path, lambda _: None)
    (tmp_path / "dict.tgt.txt").unlink()
    said = refused(capsys, path, "--out", tmp_path / "run")
    assert "there is no dict.tgt.txt in" in said
    assert "--dict-target" in said
    words = ["import", str(path), "--out", str(tmp_path / "run"), "--dict-target", str(CHECKPOINTS / "dict.tgt.txt")]
    assert command(words) == 0


def test_the_dictionary_of_another_model_is_refused(tmp_path, capsys) -> None:
    dictionary(tmp_path / "other.txt", 30)
    said = refused(capsys, MAIN, "--out", tmp_path / "run", "--dict-source", tmp_path / "other.txt")
    assert "has 30 symbols" in said
    assert "the model has 24" in said


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "arch",
            "fconv_iwslt_de_en",
            "architecture 'fconv_iwslt_de_en' is not supported; supported: lightconv_lm, light",
        ),
        ("arch", "transformerish", "architecture 'transformerish' is not supported"),
        (
            "task",
            "translation_lev",
            "task 'translation_lev' is not supported; supported: translation, language_modeling",
        ),
        ("cross_self_attention", True, "cross_self_attention is not supported"),
        ("share_all_embeddings", True, "are tied, but differ"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, capsys, key, value, said) -> None:
    path = changed(LEGACY, tmp_path, lambda contents: setattr(contents["args"], key, value))
    assert said in refused(capsys, path, "--out", tmp_path / "run")


def test_an_option_that_is_missing_is_named(tmp_path, capsys) -> None:
    path = changed(LEGACY, tmp_path, lambda contents: delattr(contents["args"], "decoder_glu"))
    assert "no option or weight 'decoder_glu'" in refused(capsys, path, "--out", tmp_path / "run")


def test_an_imported_run_is_given_its_data(run, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no file has the names that stand for the data
    train = ["train", f"{run}/recipe.yaml", "--out", str(run)]
    for words, split in ((["evaluate", str(run)], "test"), (train, "train")):
        capsys.readouterr()
        assert command(words) == 1
        said = f'was imported and has no data of its own: give it some, as in "data.splits.{split}=[SOURCE, TARGET]"'
        assert said in capsys.readouterr().err


def test_other_files_are_refused_with_what_is_supported(tmp_path, capsys) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    said = refused(capsys, tmp_path / "other.pt", "--out", tmp_path / "run")
    for known in ("fairseq (lightconv_lm, lightconv, transformer_lm", "linformer_roberta; tasks translation, language"):
        assert known in said
    (tmp_path / "text.pt").write_text("no checkpoint\n")
    assert "torch.save did not write it" in refused(capsys, tmp_path / "text.pt", "--out", tmp_path / "run")
    (tmp_path / "half.pt").write_bytes(MAIN.read_bytes()[:100_000])
    assert "half.pt is damaged" in refused(capsys, tmp_path / "half.pt", "--out", tmp_path / "run")
    assert "there is no file" in refused(capsys, tmp_path / "nothing.pt", "--out", tmp_path / "run")


def test_a_run_is_not_overwritten(run, capsys) -> None:
    before = (run / "recipe.yaml").read_bytes()
    assert command(["import", str(LEGACY), "--out", str(run)]) == 1
    assert "holds a run already" in capsys.readouterr().err
    assert (run / "recipe.yaml").read_bytes() == before


def test_layouts_are_one_model() -> None:
    """The two golden checkpoints have the same weights under other names."""
    old, new = (to_current_layout(read_pickle(path)["model"]) for path in (LEGACY, MAIN))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    ours = [convert_checkpoint(path, TextFiles()).model.state_dict() for path in (LEGACY, MAIN)]
    assert all(torch.equal(ours[0][name], ours[1][name]) for name in ours[0])
