"""docs/seeds.md: every test, command, option, recipe, preset and Python name in its rows exists."""

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer

from subquad.cli.main import build_app
from subquad.mixers import available
from subquad.models import PRESETS
from subquad.models.presets import OTHER_NAMES
from subquad.original_names import ATTENTION, AVERAGING, PROGRAMS
from subquad.train.recipe import Recipe, recipe_class

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/seeds.md").read_text()
RECIPES = {path.stem for path in (ROOT / "src/subquad/recipes").rglob("*.yaml")}


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("---", "original")]


ROWS = rows()
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@by_row
def test_the_test_of_a_row_exists(row: list[str]) -> None:
    assert len(row) == 3
    (named,) = codes(row[2])
    path, _, name = named.partition("::")
    assert (ROOT / path).is_file()
    assert not name or name in functions_of(path)
    assert name.startswith("test_") or not name


def commands_in(row: list[str]) -> list[list[str]]:
    found = [shlex.split(code) for code in codes(row[1])]
    found = [words[words.index("subquad") :] for words in found if "subquad" in words]
    return [words[1:] for words in found]


@by_row
def test_commands_of_a_row_are_known(row: list[str]) -> None:
    for words in commands_in(row):
        group = typer.main.get_command(build_app())
        while hasattr(group, "commands"):
            assert words[0] in group.commands, words
            group, words = group.commands[words[0]], words[1:]
        options = {name for parameter in group.params for name in parameter.opts}
        for before, word in zip(["", *words], words, strict=False):
            if word.startswith("--"):
                assert word in options, f"{word} of {group.name}"
            elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=.*", word):
                assert word.split(".")[0] in Recipe.model_fields, word
            elif before == "--recipe" or (group.name in ("train", "compare") and not before):
                assert word in RECIPES, word
            elif group.name == "info":
                assert word in {*available(), *PRESETS, *OTHER_NAMES}, word


@by_row
def test_recipes_presets_and_names_of_a_row_exist(row: list[str]) -> None:
    cell = row[1]
    named = cell.partition("recipe")[2] if re.search(r"\brecipes? `", cell) else ""
    for code in codes(named.partition(";")[0]):
        assert code in RECIPES, code
    for code in codes(cell) if re.search(r"\bpresets? `", cell) else []:
        assert code in PRESETS, code
    for code in codes(cell):
        if re.fullmatch(r"subquad(\.\w+)+", code):
            module, _, name = code.rpartition(".")
            assert hasattr(importlib.import_module(module), name), code
        field = re.fullmatch(r"([a-z_]+)((?:\.[a-z_]+)+)(?::?=.*)?", code)
        if field and field[1] not in ("subquad", "torch"):
            assert_field(field[1], field[2].split(".")[1:])


def assert_field(section: str, path: list[str]) -> None:
    """A field of recipes of some task; models have fields of their own, which their classes check."""
    assert section in Recipe.model_fields
    if section == "model":
        return
    tasks = ("translation", "language-model", "image-classification")
    owners = [recipe_class(task).model_fields[section].annotation for task in tasks]
    assert any(path[0] in owner.model_fields for owner in owners if owner is not None), (section, path)


def test_names_of_the_documents_are_on_the_page() -> None:
    """What the five documents name, and a reader would search for."""
    names = """
        lightconv_iwslt_de_en lightconv_wmt_en_de_big lightconv.glu.wmt17.zh-en from_pretrained cuda_function_gen.py
        --arch --source-lang --target-lang --optimizer --warmup-updates --warmup-init-lr --min-lr --inputs --output
        --path $SAVE CUDA_VISIBLE_DEVICES average_checkpoints.py fairseq-generate torch.distributed.launch --encoder-glu
        --encoder-conv-type --update-freq
        transformer_decoder.py transformer_layer.py primal_attention.py multihead_attention.py cross_entropy.py
        train_efficiency.py transformer_lm PrimalMultiheadAttention data-bin/wikitext-103 eta
        crybot/WMT14-en-de-tokenized pretokenize_dataset.py lin_k32_training.yaml lin_k64_training.yaml
        vanilla_training.yaml compare_performance.py perf_lin_k128_encoder_only.yaml evaluate.py build.sh
        AttentionFactory NestedNamespace add_attn_specific_args build_attention evit_tiny_p8 evit_tiny_p16
        ~/.wandb_secret wandb_callback requirements.txt build_ext -s
        evit_small_p16 pvt_medium2 --proj-method --encoder-attn- --decoder-attn- wikitext103-eva-16layers-lm
        wikitext103-eva-32layers-lm wmt14ende-eva-e32_c8-mt wmt14ende-eva-e8_c8-mt fairseq.models.lightconv
        pytorch/fairseq lightconv_layer dynamicconv_layer DeiT-tiny-p8 DeiT-tiny-p16 DeiT-small-p16 PVTv2-B3 ImageFolder
        qkv_bias attn_drop proj_drop
    """
    assert [name for name in names.split() if name not in PAGE] == []


def test_every_recipe_of_a_paper_is_on_the_page() -> None:
    papers = [name for name in RECIPES if re.match(r"(iwslt|wmt|wikitext103|imagenet_evit_tiny_p8)", name)]
    elsewhere = {"wikitext103_softmax_16"}  # the baseline of EVA's language models
    assert [name for name in papers if name not in PAGE and name not in elsewhere] == []


def test_flags_in_the_first_column_are_those_of_the_tables() -> None:
    known = {flag for flags in (*PROGRAMS.values(), ATTENTION, AVERAGING) for flag in flags}
    known |= {"--attn-name-encoder", "--attn-name-decoder", "--encoder-attn-*", "--decoder-attn-*"}
    known |= {"--nproc_per_node", "--checkpoint", "--config"}  # of a launcher, and of crybot's scripts
    words = [word for row in ROWS for code in codes(row[0]) for word in code.split()]
    assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in known] == []


def test_other_names_of_presets_are_on_the_page() -> None:
    assert all(name in PAGE for name in OTHER_NAMES)
