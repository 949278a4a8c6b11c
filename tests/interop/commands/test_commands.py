"""Commands of the original programs become recipes that train what they trained."""

import json
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
from subquad.interop.commands import Conversion, convert_command, convert_commands
from subquad.interop.commands.shell import split_commands
from subquad.mixers import Mixer
from subquad.models import build_from_config
from subquad.original_names import GENERATION, PREPARATION, TRAINING
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.schedules import Schedule
from tests.data.fairseq_files import numbered, write_dictionary, write_mmap
from tests.interop.commands import seeds

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parents[2] / "golden"
COUNTED_ELSEWHERE = {
    "wmt14_en_de_eva_32": 60_966_784,
    "wikitext103_causal_eva_16": 247_471_104,
    "wikitext103_causal_eva_32": 449_548_288,
}
"""Parameters of the original programs' models, counted there."""


def recipe_of(conversion: Conversion) -> Recipe:
    """The recipe as a user would read it: written as YAML, and read again."""
    return Recipe.parse("converted", yaml.safe_load(conversion.to_text()))


def shipped(name: str) -> Recipe:
    return read_recipe(name)


def meta_model(recipe: Recipe) -> Any:
    with torch.device("meta"):
        return build_from_config(recipe.model_data({}))


def layers(recipe: Recipe) -> tuple[Any, list[Any]]:
    """The config of the model, and that of every mixer, with all defaults filled in."""
    model = meta_model(recipe)
    mixers = [(name, part.name, part.config) for name, part in model.named_modules() if isinstance(part, Mixer)]
    return without_mixers(model.config.model_dump()), mixers


def without_mixers(content: Any) -> Any:
    if isinstance(content, list | tuple):
        return [without_mixers(part) for part in content]
    if not isinstance(content, dict):
        return content
    return {name: without_mixers(part) for name, part in content.items() if name not in ("mixer", "cross")}


def rates(recipe: Recipe) -> list[float]:
    """The learning rates of 20 updates at the start, and of some along the whole curve."""
    schedule = Schedule(recipe.schedule, recipe.train.updates, recipe.train.epochs)
    last = recipe.train.updates or 1000
    updates = [*range(20), *(last * step // 50 for step in range(50))]
    return [schedule.learning_rate(update, update // 100) for update in updates]


def assert_same_training(found: Recipe, expected: Recipe) -> None:
    """Model, optimiser, learning rates, batches and loss are the same; data and logs may differ."""
    assert found.task == expected.task
    assert layers(found) == layers(expected)
    assert found.optim == expected.optim
    assert rates(found) == pytest.approx(rates(expected), rel=1e-12)
    assert found.schedule.stop_lr == expected.schedule.stop_lr
    apart = {"log_every", "validate_every", "data_workers", "precision"}
    assert found.train.model_dump(exclude=apart) == expected.train.model_dump(exclude=apart)
    assert (found.train.precision == "float32") == (expected.train.precision == "float32")


@pytest.mark.parametrize("name", seeds.TRAININGS)
def test_a_command_is_the_recipe_that_ships(name: str) -> None:
    assert_same_training(recipe_of(convert_commands(seeds.TRAININGS[name])), shipped(name))


@pytest.mark.parametrize("name", seeds.LINFORMER)
def test_a_config_of_crybot_is_the_recipe_that_ships(name: str, tmp_path: Path) -> None:
    config, proj_k = seeds.LINFORMER[name]
    write_config(tmp_path / f"configs/{config}.yaml", proj_k)
    text = f"./build.sh && ./run.sh src/train_my.py --config configs/{config}.yaml"
    found = convert_command(text, tmp_path)
    assert_same_training(recipe_of(found[-1]), shipped(name))
    text = shipped(name).data.model_dump_json().replace("data/wmt14_en_de_csv/", "datasets/")
    assert recipe_of(found[-1]).data.model_dump_json() == text.replace("data/bart/", "models/facebook/bart-base/")
    assert recipe_of(found[-1]).decode == shipped(name).decode
    assert shipped(name).decode.beam == 1


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


def test_settings_without_a_counterpart_are_listed(tmp_path: Path) -> None:
    write_config(tmp_path / "x.yaml", 32)
    content = yaml.safe_load((tmp_path / "x.yaml").read_text())
    content["training"]["lr_scheduler"] |= {"cosine_factor": 1.0, "cosine_restart": True}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content | {"model": content["model"] | {"dropout": 0.5}}))
    found = convert_commands("./run.sh src/train_my.py --config x.yaml", tmp_path)
    assert list(found.unsupported) == ["model.dropout", "training.lr_scheduler.cosine_restart"]


def write_config(path: Path, proj_k: int | None) -> None:
    """A config as crybot/linformer's are."""
    model: dict[str, Any] = {"type": "Vanilla transformer" if proj_k is None else "Linformer"}
    model |= {"dim": 512, "mlp_dim": 2048, "n_heads": 8, "n_layers": 6} | ({} if proj_k is None else {"k": proj_k})
    schedule = {"warmup_steps": 4000, "cosine_annealing": True, "cosine_tmax": 10, "min_lr": 1e-6}
    training = {"epochs": 10, "batch_size": 88, "learning_rate": 1e-4, "lr_scheduler": schedule}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"model": model, "training": training, "dataset": {"max_length": 256}}))


# ---------------------------------------------------------------------- against numbers of the originals


@pytest.mark.parametrize("name", COUNTED_ELSEWHERE)
def test_a_model_has_the_parameters_of_the_original(name: str) -> None:
    assert meta_model(recipe_of(convert_commands(seeds.TRAININGS[name]))).parameter_count() == COUNTED_ELSEWHERE[name]


@pytest.mark.parametrize("name", seeds.IMAGE_COMMANDS)
def test_an_image_model_has_the_parameters_of_the_original(name: str) -> None:
    counts = json.loads((GOLDEN / "efficient-attention/param_counts.json").read_text())
    size, _, mechanism = name.removeprefix("imagenet_").rpartition("_")
    found = meta_model(recipe_of(convert_commands(seeds.IMAGE_COMMANDS[name]))).parameter_count()
    assert found == counts[f"{size.replace('pvt_v2_b3', 'pvt_medium2')}/{mechanism}"]


def test_the_script_names_its_run() -> None:
    text = seeds.LANGUAGE_COMMANDS["wmt14_en_de_eva_8"]
    assert convert_commands(text).commands[0].endswith("--out runs/eva_8_8")
    assert convert_commands(text.replace("-g 4", "-g 4 -r old/ckpt")).commands[0].endswith("--out runs/ckpt")


# ---------------------------------------------------------------------- commands that train nothing


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


def test_a_variable_that_nothing_sets_is_named() -> None:
    found = convert_commands(f"{seeds.AVERAGE}\n{seeds.GENERATE}")
    assert len([note for note in found.notes if note.startswith("The text does not set $SAVE")]) == 1
    found = convert_commands(f"{seeds.IWSLT}\n{seeds.AVERAGE}\n{seeds.GENERATE}")
    assert not [note for note in found.notes if "does not set" in note]


def test_what_follows_a_training_is_listed_with_it() -> None:
    found = convert_commands(f"{seeds.IWSLT}\n{seeds.AVERAGE}\n{seeds.GENERATE}")
    assert [line.split()[1] for line in found.commands] == ["train", "average", "evaluate"]
    assert recipe_of(found).checkpoints.keep_epochs == 10


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


def test_the_script_without_gpus_and_folder_takes_its_own() -> None:
    found = convert_commands("bash main.sh -m evit_tiny_p8 -d imagenet -e TRUE --attn-name softmax")
    recipe = recipe_of(found)
    assert recipe.train.accumulate == 4
    assert recipe.schedule.lr == 5e-4
    assert found.recipe is not None
    assert found.recipe["data"]["images"]["train"] == "datasets/imagenet/train"
    assert "counts on 4 GPUs" in found.notes[-1]


def test_the_lines_of_a_pyramid_name_their_flags() -> None:
    text = convert_commands(seeds.IMAGE_COMMANDS["imagenet_pvt_v2_b3_lara"]).to_text()
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if not line.startswith("#")}
    assert lines["drop_path"].endswith("# --drop-path-rate 0.3")
    assert "# --attn-name lara --mis-type mis-opt" in lines["stages"]
    assert "*id" not in text, "every stage is written out"


def test_the_efficiency_test_measures_the_recipe() -> None:
    (found,) = convert_command(seeds.PRIMAL_EFFICIENCY)
    assert_same_training(recipe_of(found), shipped("wikitext103_primal"))
    assert found.commands[0].startswith("subquad bench --recipe")


# ---------------------------------------------------------------------- the shell


@pytest.mark.parametrize(
    ("text", "program", "processes", "gpus"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1 fairseq-train d --arch a", "fairseq-train", 1, 2),
        ("torchrun --nproc_per_node=4 --nnodes 2 $(which fairseq-train) d", "fairseq-train", 8, None),
        ("python3 -m torch.distributed.run --nproc-per-node 2 -m fairseq_cli.train d", "fairseq_cli.train", 2, None),
        ("nohup python -u fairseq_cli/train.py d > log.txt 2>&1 &", "fairseq_cli/train.py", 1, None),
        ("cd fairseq; X=train; python3 -m fairseq_cli.$X d # the rest", "fairseq_cli.train", 1, None),
    ],
)
def test_the_program_of_a_line(text: str, program: str, processes: int, gpus: int | None) -> None:
    (found,) = split_commands(text)
    assert (found.program, found.processes, found.gpus) == (program, processes, gpus)
    assert found.words[0] == "d"


def test_batches_of_all_processes_count() -> None:
    base = "fairseq-train d --arch lightconv_iwslt_de_en --optimizer adam --max-update 9 --update-freq 2"
    for prefix, expected in (("", 2), ("CUDA_VISIBLE_DEVICES=0,1,2 ", 6), ("torchrun --nproc_per_node 4 ", 8)):
        assert recipe_of(convert_commands(prefix + base)).train.accumulate == expected


# ---------------------------------------------------------------------- what is wrong, and what is missing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fairseq-train d --arch lightconv_iwslt_de_eng", "did you mean 'lightconv_iwslt_de_en'"),
        ("fairseq-train d --max-update 3", "names no --arch"),
        ("fairseq-train d --task speech_to_text --arch x", "the task speech_to_text has no counterpart"),
        ("fairseq-train d --arch lightconv_iwslt_de_en --encoder-glu maybe", "--encoder-glu maybe: a truth value is"),
        ("fairseq-train d --arch lightconv_iwslt_de_en --max-tokens", "--max-tokens needs a value"),
        ("bash main.sh -d cifar -e TRUE", "-d cifar is unknown"),
        ("bash main.sh -m evit_huge -d imagenet -e TRUE", "no preset is the model 'evit_huge'"),
        ("bash main.sh -d wmt -e TRUE --attn-name-encoder fourier", "no mechanism 'fourier'"),
        ("bash main.sh -m 16layer -d wikitext103 -e TRUE", "-m 16layer is unknown; did you mean '16layers'"),
        ("bash main.sh -m 16layers -d wmt -e TRUE", "With -d wmt it takes default"),
        ("./run.sh src/train_my.py --config none.yaml", "there is no config of crybot/linformer"),
        ("make coffee", "make: this program is not known"),
        ("conda activate fairseq\npip install timm", "this starts no program that is needed here"),
        ("fairseq-train 'd", "a quotation mark"),
        (f"{seeds.IWSLT}\n{seeds.WMT16}", "these are 2 trainings"),
    ],
)
def test_a_mistake_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_commands(text)


def test_flags_without_a_counterpart_are_listed_with_the_reason() -> None:
    found = convert_commands(f"{seeds.IWSLT} --fp16-scale-window 4 --made-up 3")
    assert found.unsupported["--ddp-backend=legacy_ddp"] == "train.sharded chooses the engine of several processes"
    assert "--made-up 3" in found.unsupported
    assert "# Without a counterpart: --made-up 3" in found.to_text()


def test_no_flag_of_a_model_goes_without_a_word() -> None:
    """What the architecture has already has no line in the recipe, and what it has no part for does nothing there."""
    found = convert_commands(seeds.IWSLT)
    (note,) = [note for note in found.notes if note.startswith("The architecture has this already")]
    for words in ("--attention-dropout 0.1", "--weight-dropout 0.1", "--encoder-glu 0", "--decoder-glu 0"):
        assert words in note
    assert "--dropout 0.3" not in note
    found = convert_commands("fairseq-train d -a transformer_iwslt_de_en --optimizer adam --lr 1 --encoder-glu 1")
    assert found.unsupported == {"--encoder-glu 1": "transformer_iwslt_de_en has no part that it changes"}


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
    given |= {"--optimizer": "adam", "--task": "masked_lm", "--criterion": "masked_lm", "--arch": "transformer_lm_wiki103"}
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


def test_a_training_ends_with_the_first_of_its_limits() -> None:
    train = recipe_of(convert_commands(f"{seeds.IWSLT} --max-epoch 3")).train
    assert (train.updates, train.epochs) == (50000, 3)


# ---------------------------------------------------------------------- the command line


def test_the_command_prints_a_recipe_that_is_read_again(tmp_path: Path, capsys) -> None:
    (tmp_path / "train.sh").write_text(seeds.IWSLT)
    assert command(["recipes", "--from", str(tmp_path / "train.sh")]) == 0
    printed = capsys.readouterr().out
    assert "# --dropout 0.3" in printed
    assert_same_training(Recipe.parse("printed", yaml.safe_load(printed)), shipped("iwslt14_de_en_dynamicconv"))
    assert command(["recipes", "--from", seeds.IWSLT, "--out", str(tmp_path / "my.yaml")]) == 0
    assert f"subquad train {tmp_path / 'my.yaml'} --out runs/dynamic_conv_iwslt" in (tmp_path / "my.yaml").read_text()
    assert f"subquad train {tmp_path / 'my.yaml'} --out runs/dynamic_conv_iwslt" in capsys.readouterr().out
    assert command(["recipes", "--from", f"SAVE=x\n{seeds.AVERAGE}", "--out", str(tmp_path / "none.yaml")]) == 1
    assert "trains nothing, so that there is no recipe to write" in capsys.readouterr().err
    assert not (tmp_path / "none.yaml").exists()


def test_a_command_may_be_longer_than_the_name_of_a_file(capsys) -> None:
    assert command(["recipes", "--from", seeds.IMAGE_COMMANDS["imagenet_pvt_v2_b3_eva"]]) == 0
    assert "preset: pvt_v2_b3" in capsys.readouterr().out
    assert command(["recipes", "--from", f"fairseq-generate data-bin --path {'x/' * 3000}y.pt"]) == 0


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
    tokenizers = recipe_of(convert_commands(text)).data
    assert (tokenizers.tokenizer.vocab_size, tokenizers.target_tokenizer.vocab_size) == (None, 9)
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
    assert recipe_of(convert_commands(text)).data.fairseq.path == "data-bin/x/", "what was prepared once is read"


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


def test_a_command_is_trained_in_one_go(tmp_path: Path, capsys, monkeypatch) -> None:
    """On a folder as fairseq-preprocess writes it, with changes to what the command says."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data-bin/small"
    folder.mkdir(parents=True)
    numbers = {side: write_dictionary(folder / f"dict.{side}.txt", ["a", "b", "c"]) for side in ("de", "en")}
    for split in ("train", "valid"):
        for side in ("de", "en"):
            write_mmap(folder / f"{split}.de-en.{side}", numbered(["a b", "c", "b a c", "c c"], numbers[side]))
    text = "fairseq-train data-bin/small -a lightconv_iwslt_de_en --optimizer adam --lr 0.001 --max-update 2 "
    text += "--max-tokens 200 --save-dir checkpoints/small --encoder-layers 7"
    small = ["model.dim=16", "model.encoder.ffn_dim=16", "model.decoder.ffn_dim=16"]
    assert command(["train", "--from", text, *small]) == 0, capsys.readouterr().err
    assert "after 2 updates" in capsys.readouterr().out
    assert read_recipe(tmp_path / "runs/small/recipe.yaml").train.updates == 2


FINE_TUNING = "fairseq-train data-bin/de-en -a transformer_iwslt_de_en --optimizer adam --lr 1e-4 --max-update 50"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--finetune-from-model old/checkpoint_best.pt --save-dir new",
            "--from-run runs/old --checkpoint best --reset optimizer,schedule --out runs/new",
        ),
        (
            "--restore-file old/checkpoint_last.pt --save-dir new",
            "--from-run runs/old --checkpoint last --out runs/new",
        ),
        (
            "--restore-file old/checkpoint12.pt --reset-optimizer --reset-lr-scheduler --reset-dataloader",
            "--from-run runs/old --checkpoint last --reset optimizer,schedule --out runs/finetuned",
        ),
        # of the training's own folder: it goes on by itself
        ("--restore-file checkpoint_last.pt --save-dir new", "--out runs/new"),
    ],
)
def test_a_training_that_begins_with_a_checkpoint(flags: str, words: str) -> None:
    (found,) = convert_command(f"{FINE_TUNING} {flags}")
    assert found.commands == [f"subquad train RECIPE.yaml {words}"]
    assert not found.unsupported
    assert any("subquad import old/" in note for note in found.notes) == ("--from-run" in words)
