"""Programs that train nothing, and texts with several programs: preparation, averaging, generation, measurement."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from subquad.cli.main import run as command
from subquad.data.text.store import open_prepared
from subquad.interop.commands import convert_command, convert_commands
from subquad.original_names import GENERATION, PREPARATION, TRAINING
from subquad.tasks.translation import TranslationData
from tests.interop.commands import seeds
from tests.interop.commands.converted import recipe_of


@pytest.mark.parametrize(
    ("model", "longest", "words"),
    [
        (
            {"type": "Linformer", "k": 128, "encoder_only": True},
            16384,
            "linformer_translation_k128 --part encoder --lengths 256,512,1024,2048,4096,8192,16384 --tokens 16384",
        ),
        ({"type": "Linformer", "k": 64}, 512, "linformer_translation_k64 --lengths 256,512 --tokens 16384"),
        # exact attention has no longest input, and the original measures all lengths
        (
            {"type": "Vanilla transformer"},
            256,
            "vanilla_translation --lengths 256,512,1024,2048,4096,8192,16384 --tokens 16384",
        ),
        (
            {"type": "Linformer", "k": 64, "n_layers": 2},
            256,
            "linformer_translation_k64 --lengths 256 --tokens 16384 --set encoder.layers=2 --set decoder.layers=2",
        ),
    ],
)
def test_a_measurement_of_crybot(model: dict[str, Any], longest: int, words: str, tmp_path: Path) -> None:
    sizes = {"dim": 512, "mlp_dim": 2048, "n_heads": 8, "n_layers": 6, "vocab_size": 50272}
    config = {"model": sizes | model, "training": {"batch_size": 256}, "dataset": {"max_length": longest}}
    (tmp_path / "perf.yaml").write_text(yaml.safe_dump(config))
    (found,) = convert_command("./run.sh src/compare_performance.py --config perf.yaml", tmp_path)
    assert found.commands == [f"subquad bench --preset {words} --out perf.csv"]


def test_a_checkpoint_of_crybot_is_fetched_imported_and_evaluated() -> None:
    """It is a file of a run; an artifact is a run of ours."""
    (found,) = convert_command("./run.sh src/evaluate.py --checkpoint s3edn4nb --out s3edn4nb_out.csv")
    assert list(found.unsupported) == ["--out s3edn4nb_out.csv"]
    assert found.commands[:2] == [
        "wandb pull -p HLT s3edn4nb",
        "subquad import checkpoint.pt --out runs/s3edn4nb --tokenizer models/facebook/bart-base/tokenizer.json",
    ]
    assert shlex.split(found.commands[2])[:3] == ["subquad", "evaluate", "runs/s3edn4nb"]
    (found,) = convert_command("./run.sh src/evaluate.py --checkpoint me/HLT/run-k32:best")
    assert found.commands == ["subquad evaluate wandb:me/HLT/run-k32:best --split test"]


def test_averaging_and_generating() -> None:
    text = f"SAVE=save/dynamic_conv_iwslt\n{seeds.AVERAGE}\n{seeds.GENERATE}"
    average, generate = convert_command(text)
    assert average.commands == ["subquad average runs/dynamic_conv_iwslt --epochs 10"]
    assert generate.commands == [
        "subquad evaluate runs/dynamic_conv_iwslt --checkpoint average --split test decode.batch_sentences=128 "
        "decode.beam=4 decode.lenpen=1 decode.remove_bpe=subword_nmt"
    ]
    assert "subquad import save/dynamic_conv_iwslt/checkpoint_last10_avg.pt" in generate.notes[0]


def test_a_validation_names_its_subsets() -> None:
    (found,) = convert_command("fairseq-validate data-bin/x --path c/checkpoint_best.pt --valid-subset valid,test")
    assert found.commands == ["subquad evaluate runs/c --checkpoint best --split valid,test"]
    assert not found.unsupported


def test_the_script_scores_what_it_was_given() -> None:
    (wmt,) = convert_command(seeds.INFERENCE["wmt"].replace("<dir-of-your-bin-data>", "bin"))
    assert wmt.commands == [
        "subquad import ckpt/avg.pt --out runs/ckpt --dict-source bin/wmt16-en-de/dict.en.txt "
        "--dict-target bin/wmt16-en-de/dict.de.txt",
        "subquad evaluate runs/ckpt --checkpoint last --split test decode.beam=4 decode.lenpen=0.6 "
        "decode.max_len_a=1 decode.max_len_b=50 decode.remove_bpe=subword_nmt",
    ]
    assert "--checkpoint average" in wmt.notes[0]
    (language,) = convert_command(seeds.INFERENCE["wikitext103"])
    assert language.commands == [
        "subquad import ckpt/checkpoint_last.pt --out runs/ckpt --dict-source DATA/wikitext-103/dict.txt",
        "subquad evaluate runs/ckpt --checkpoint last --split valid,test --context-window 0,256,480",
    ]


@pytest.mark.parametrize("program", ["generate", "interactive", "validate", "eval-lm", "preprocess", "train"])
def test_every_flag_of_a_program_leaves_a_trace(program: str) -> None:
    """In the recipe, the command or the list of what has no counterpart."""
    tables = {"preprocess": PREPARATION, "train": TRAINING}
    base = f"fairseq-{program} data-bin/x " + {
        "preprocess": "--trainpref a --validpref b",
        "train": "-a transformer_lm --task language_modeling --optimizer nag --save-dir own --max-update 9",
    }.get(program, "--path m/checkpoint_best.pt")
    before = convert_command(base)[0]
    given = {"--sample-break-mode": "eos", "--adam-betas": "(0.8,0.9)", "--lr-scheduler": "cosine --warmup-updates 2"}
    given |= {
        "--optimizer": "adam",
        "--task": "masked_lm",
        "--criterion": "masked_lm",
        "--arch": "transformer_lm_wiki103",
    }
    for name, flag in tables.get(program, GENERATION).items():
        if name == "--restore-file":  # of the training's own folder, which the same command goes on with
            continue
        value = "" if flag.switch else given.get(name, "7")
        found = convert_command(f"{base} {name} {value}")[0]
        assert found != before, name


def test_several_models_translate_together() -> None:
    words = "data-bin/x --path one/checkpoint_best.pt:two/checkpoint_best.pt"
    found = convert_commands(f"fairseq-interactive {words} --max-len-b 9 --post-process subword_nmt --input lines.txt")
    command = "subquad translate runs/one runs/two --checkpoint best --max-len-b 9 --remove-bpe subword_nmt < lines.txt"
    assert found.commands == [command]
    assert len([note for note in found.notes if "subquad import" in note]) == 2
    found = convert_commands(f"fairseq-generate {words} --source-lang de")
    assert list(found.unsupported) == ["--source-lang de", "--path one/checkpoint_best.pt:two/checkpoint_best.pt"]


@pytest.mark.parametrize("joined", ["", " --joined-dictionary"])
def test_preprocessing_is_a_command_that_runs(joined: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for side, lines in (("de", "ein Hund\nzwei\n"), ("en", "a dog\ntwo\n")):
        (tmp_path / f"train.{side}").write_text(lines)
        (tmp_path / f"valid.{side}").write_text(lines)
    text = (
        "fairseq-preprocess --source-lang de --target-lang en --trainpref train --validpref valid --destdir data-bin/x"
    )
    (found,) = convert_command(text + joined)
    assert command(shlex.split(found.commands[0])[1:]) == 0
    prepared = open_prepared("data/x")
    assert prepared.store("train", "target").lengths.tolist() == [2, 1]
    assert prepared.tokenizer("target").size == (16 if joined else 8), "filled up to a multiple of 8, as fairseq's are"
    assert (prepared.description["fields"]["source"] == prepared.description["fields"]["target"]) == bool(joined)


def test_limits_of_preprocessed_vocabularies() -> None:
    text = "fairseq-preprocess -s de -t en --trainpref t --destdir d --thresholdsrc 2 --padding-factor 1 "
    (found,) = convert_command(text + "--thresholdtgt 3 --nwordssrc 99 --nwordstgt 99")
    assert "--vocab-size 99 --min-count 2 --multiple 1" in found.commands[0]
    assert [note.split(":")[0] for note in found.notes if "for both languages" in note] == ["--thresholdtgt 3"]
    assert not found.unsupported


def test_preparation_training_averaging_and_generation_in_one_text(tmp_path: Path, monkeypatch, capsys) -> None:
    """From text to hypotheses: the folder of fairseq-preprocess is not there, and nothing has to be prepared."""
    monkeypatch.chdir(tmp_path)
    lines = {"de": "ei@@ n Hund\nzwei Hun@@ de\nein@@ er\n", "en": "a dog\ntwo do@@ gs\no@@ ne\n"}
    for side, text in lines.items():
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.{side}").write_text(text)
    preparation = (
        "fairseq-preprocess -s de -t en --trainpref train --validpref valid --testpref test --destdir data-bin/x"
    )
    training = "fairseq-train data-bin/x/ -a transformer_iwslt_de_en --optimizer adam --lr 0.1 --max-epoch 3 --seed 3"
    training += " --max-tokens 40 --keep-last-epochs 2 --save-dir save/x --encoder-layers 1 --decoder-layers 1"
    rest = "average_checkpoints.py --inputs save/x --num-epoch-checkpoints 2 --output save/x/avg.pt\n"
    rest += "fairseq-generate data-bin/x --path save/x/avg.pt --beam 2 --remove-bpe --gen-subset test"
    text = f"{preparation} --nwordstgt 9\n{training}\n{rest}"
    data = recipe_of(convert_commands(text)).data
    assert isinstance(data, TranslationData)
    assert data.target_tokenizer is not None
    assert (data.tokenizer.vocab_size, data.target_tokenizer.vocab_size) == (None, 9)
    small = ["model.dim=8", "model.encoder.ffn_dim=8", "model.decoder.ffn_dim=8"]
    assert command(["train", "--from", text, *small]) == 0, capsys.readouterr().err
    steps = [shlex.split(line)[1:] for line in convert_commands(text).commands]
    assert [words[0] for words in steps] == ["train", "average", "evaluate"]
    assert [command(words) for words in steps[1:]] == [0, 0], capsys.readouterr().err
    folder = tmp_path / "runs/x/checkpoints"
    average, *epochs = (load_file(folder / name / "model.safetensors") for name in ("average", *epoch_names(folder)))
    assert len(epochs) == 2
    for name, found in average.items():
        torch.testing.assert_close(found, (epochs[0][name] + epochs[1][name]) / 2)
    assert any(not torch.equal(found, epochs[1][name]) for name, found in average.items())
    assert "@@" not in (tmp_path / "runs/x/evaluation-test.hyp.txt").read_text()
    (tmp_path / "data-bin/x").mkdir(parents=True)
    data = recipe_of(convert_commands(text)).data
    assert isinstance(data, TranslationData)
    assert data.fairseq is not None, "what was prepared once is read"
    assert data.fairseq.path == "data-bin/x/"


def epoch_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("update-"))


def test_pretokenising_is_a_command_that_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}, unk_token="<unk>"))
    (tmp_path / "models/facebook/bart-base").mkdir(parents=True)
    (tmp_path / "datasets").mkdir()
    tokenizer.save("models/facebook/bart-base/tokenizer.json")
    for split in ("train", "validation", "test"):
        Path(f"datasets/wmt14_translate_de-en_{split}.csv").write_bytes(b"de,en\nb,a\na\rb,b\n")
    (found,) = convert_command("./run.sh src/pretokenize_dataset.py")
    assert command(shlex.split(found.commands[0])[1:]) == 0
    assert open_prepared("data/wmt14_en_de_tokens").store("train", "source")[0].tolist() == [4]
