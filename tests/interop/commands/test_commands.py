"""Commands of the original programs become recipes that train what they trained."""

from pathlib import Path

import pytest
import yaml

from subquad.cli.main import run as command
from subquad.interop.commands import convert_command, convert_commands
from subquad.interop.commands.shell import split_commands
from subquad.train.recipe import Recipe, read_recipe
from tests.data.fairseq_files import numbered, write_dictionary, write_mmap
from tests.interop.commands import seeds
from tests.interop.commands.converted import assert_same_training, layers, recipe_of, shipped, write_config


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


def test_settings_without_a_counterpart_are_listed(tmp_path: Path) -> None:
    write_config(tmp_path / "x.yaml", 32)
    content = yaml.safe_load((tmp_path / "x.yaml").read_text())
    content["training"]["lr_scheduler"] |= {"cosine_factor": 1.0, "cosine_restart": True}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content | {"model": content["model"] | {"dropout": 0.5}}))
    found = convert_commands("./run.sh src/train_my.py --config x.yaml", tmp_path)
    assert list(found.unsupported) == ["model.dropout", "training.lr_scheduler.cosine_restart"]


# ---------------------------------------------------------------------- what a recipe says besides its numbers


def test_the_script_names_its_run() -> None:
    text = seeds.LANGUAGE_COMMANDS["wmt14_en_de_eva_8"]
    assert convert_commands(text).commands[0].endswith("--out runs/eva_8_8")
    assert convert_commands(text.replace("-g 4", "-g 4 -r old/ckpt")).commands[0].endswith("--out runs/ckpt")


def test_a_variable_that_nothing_sets_is_named() -> None:
    found = convert_commands(f"{seeds.AVERAGE}\n{seeds.GENERATE}")
    assert len([note for note in found.notes if note.startswith("The text does not set $SAVE")]) == 1
    found = convert_commands(f"{seeds.IWSLT}\n{seeds.AVERAGE}\n{seeds.GENERATE}")
    assert not [note for note in found.notes if "does not set" in note]


def test_what_follows_a_training_is_listed_with_it() -> None:
    found = convert_commands(f"{seeds.IWSLT}\n{seeds.AVERAGE}\n{seeds.GENERATE}")
    assert [line.split()[1] for line in found.commands] == ["train", "average", "evaluate"]
    assert recipe_of(found).checkpoints.keep_epochs == 10


@pytest.mark.parametrize("name", seeds.WITHOUT_GPUS)
def test_the_script_without_gpus_and_folder_takes_its_own(name: str) -> None:
    found = convert_commands(seeds.WITHOUT_GPUS[name])
    recipe, eight = recipe_of(found), shipped(name)
    assert (recipe.train.accumulate, eight.train.accumulate) == (4, 8)
    assert (recipe.schedule.lr, eight.schedule.lr) == (5e-4, 1e-3)
    assert layers(recipe) == layers(eight)
    assert recipe.optim == eight.optim
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
