"""fairseq's way to use a model from Python: from_pretrained, and torch.hub with the published names."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.data.tokenizers.fairseq import post_process
from subquad.decode.options import DecodeOptions
from subquad.decode.translate import Translator
from subquad.interop.checkpoints import import_checkpoint
from subquad.interop.checkpoints.fairseq.hub import (
    EVA,
    PUBLISHED,
    HubInterface,
    from_pretrained,
    load_published,
    published_folder,
)
from tests.interop.test_import import write_checkpoint
from tests.originals.files import FOLDER, load

ROOT = Path(__file__).parents[2]
CHECKPOINTS = FOLDER / "fairseq" / "ckpt"
GOLDEN = json.loads((CHECKPOINTS / "generation.json").read_text())
SOURCES = (CHECKPOINTS / "test.src").read_text().splitlines()
BEST = [hypotheses[0] for hypotheses in GOLDEN["dynamic"]["hypos"]]
ASKED: dict[str, Any] = {name: GOLDEN[name] for name in ("beam", "lenpen", "max_len_b")}
NAME = "dynamicconv.glu.wmt17.zh-en"
pytest.importorskip("sacremoses")


def codes_for(words: set[str]) -> str:
    """Codes that leave each of these words in one piece."""
    merges: dict[str, None] = {}
    for word in sorted(words):
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            merges[f"{parts[0]} {parts[1]}"] = None
            parts[:2] = [parts[0] + parts[1]]
    return "".join(f"{line}\n" for line in ["#version: 0.2", *merges])


def place(folder: Path, checkpoint: str = "main_dynamic_glu.pt") -> Path:
    """The files of a published archive: model.pt, dictionaries and codes."""
    folder.mkdir(parents=True)
    shutil.copyfile(CHECKPOINTS / checkpoint, folder / "model.pt")
    for name in ("dict.src.txt", "dict.tgt.txt"):
        shutil.copyfile(CHECKPOINTS / name, folder / name)
    (folder / "bpecodes").write_text(codes_for({word for line in SOURCES for word in line.split()}))
    return folder


# ---------------------------------------------------------------------- from_pretrained


@pytest.mark.parametrize("checkpoint", ["main_dynamic_glu.pt", "legacy_dynamic_glu.pt"])
def test_translations_are_fairseqs(checkpoint: str, tmp_path: Path) -> None:
    model = from_pretrained(place(tmp_path / "model", checkpoint), tokenizer="moses", bpe="subword_nmt")
    assert model.translate(SOURCES, **ASKED) == [best["text"] for best in BEST]
    assert model.translate(SOURCES[0], **ASKED) == BEST[0]["text"]
    assert model.translate([]) == []


def test_text_in_pieces() -> None:
    """Without BPE the text is what the dictionaries have."""
    model = from_pretrained(CHECKPOINTS, checkpoint_file="main_dynamic_glu.pt")
    found = model.translate(SOURCES, **ASKED)
    assert any("@@" in text for text in found)
    assert [post_process(text, "subword_nmt") for text in found] == [best["text"] for best in BEST]


def test_codes_are_used_only_when_asked_for(tmp_path: Path) -> None:
    folder = place(tmp_path / "model")
    pieces, words = from_pretrained(folder), from_pretrained(folder, bpe="subword_nmt")
    assert pieces.decode(BEST[0]["tokens"]) != words.decode(BEST[0]["tokens"]) == BEST[0]["text"]


def test_codes_of_other_programs_are_no_obstacle_until_they_are_asked_for(tmp_path: Path) -> None:
    """fastBPE's have a third column, the number of times that a pair was seen."""
    folder = place(tmp_path / "model")
    (folder / "bpecodes").write_text("s 1</w> 52\nt 1</w> 17\n")
    assert from_pretrained(folder).translate(SOURCES[0], **ASKED)
    with pytest.raises(ValueError, match=r"bpecodes, line 1: a merge is two symbols, got 's 1</w> 52'"):
        from_pretrained(folder, bpe="subword_nmt")


def test_numbers_of_sentences(tmp_path: Path) -> None:
    model = from_pretrained(place(tmp_path / "model"), tokenizer="moses", bpe="subword_nmt")
    tokens = model.encode(SOURCES[0])
    assert tokens.dtype == torch.int64
    symbols = [model.source.id_to_token(number) for number in tokens]
    assert symbols == [*SOURCES[0].split(), "</s>"]
    assert model.decode(torch.tensor(BEST[0]["tokens"])) == BEST[0]["text"]


def test_files_in_several_places(tmp_path: Path) -> None:
    """Checkpoint, dictionaries and codes each in a folder of their own."""
    folder, data = place(tmp_path / "model"), tmp_path / "model" / "data-bin"
    data.mkdir()
    for name in ("dict.src.txt", "dict.tgt.txt"):
        (folder / name).rename(data / name)
    codes = (folder / "bpecodes").rename(tmp_path / "some.codes")
    (folder / "model.pt").rename(folder / "checkpoint_best.pt")
    for place_of_data in (data, "./data-bin"):
        model = from_pretrained(
            folder,
            checkpoint_file="checkpoint_best.pt",
            data_name_or_path=place_of_data,
            bpe="subword_nmt",
            bpe_codes=codes,
        )
        assert model.translate(SOURCES[1], **ASKED) == BEST[1]["text"]


def test_an_ensemble_of_several_files() -> None:
    """Files with colons between them are the models that `Translator` takes together."""
    names = ["main_dynamic_glu.pt", "main_dynamic_glu_avg3.pt"]
    models: Any = [from_pretrained(CHECKPOINTS, name).models[0] for name in names]
    both = from_pretrained(CHECKPOINTS, ":".join(names))
    assert len(both.models) == 2
    together = Translator(models, both.source, both.target, DecodeOptions(**ASKED))
    assert both.translate(SOURCES, **ASKED) == [found.text for found in together.translate(SOURCES)]
    for ours, alone in zip(both.models, models, strict=True):
        for name, weight in alone.state_dict().items():
            assert torch.equal(ours.state_dict()[name], weight)


def test_it_moves_like_a_module() -> None:
    model = from_pretrained(CHECKPOINTS, "main_dynamic_glu.pt")
    before = model.translate(SOURCES, **ASKED)
    assert not any(module.training for module in model.modules())
    assert model.double().translate(SOURCES, **ASKED) == before
    assert next(model.parameters()).dtype == torch.float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model.translate(SOURCES, **ASKED) != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "nltk"}, "tokenizer 'nltk' is not supported; it is 'moses'"),
        ({"bpe": "fastbpe"}, "bpe 'fastbpe' is not supported; it is 'subword_nmt'"),
        ({"tokenizer": "moses"}, "tokenizer 'moses' comes before bpe='subword_nmt'"),
        ({"bpe_codes": "codes"}, "bpe_codes are for bpe='subword_nmt'"),
        ({"bpe": "subword_nmt"}, "has neither bpecodes nor code: name the codes of subword_nmt with bpe_codes"),
        ({"bpe": "subword_nmt", "bpe_codes": "none"}, "none: there is no such file"),
        ({"checkpoint_file": "other.pt"}, r"there is no file .*other\.pt"),
        ({"checkpoint_file": "dict.src.txt"}, r"dict\.src\.txt is refused: torch\.save did not write it"),
        ({"data_name_or_path": "./nowhere"}, r"model\.pt: there is no dict\.src\.txt in .*nowhere"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = place(tmp_path / "model")
    (folder / "bpecodes").unlink()
    with pytest.raises(ValueError, match=message) as caught:
        from_pretrained(folder, **options)
    assert "\n" not in str(caught.value)


def test_hypotheses_and_their_scores_are_fairseqs() -> None:
    """generate gives the golden search's tokens and scores; score gives the same numbers for the same tokens."""
    model = from_pretrained(CHECKPOINTS, "main_dynamic_glu.pt")
    sources = [model.encode(text) for text in SOURCES]
    every = model.generate(sources, **ASKED)
    for hypotheses, golden in zip(every, GOLDEN["dynamic"]["hypos"], strict=True):
        assert [one["tokens"].tolist() for one in hypotheses] == [one["tokens"] for one in golden]
        assert [one["score"] for one in hypotheses] == pytest.approx([one["score"] for one in golden], abs=1e-4)
    (best, *_), first = every[0], model.generate(sources[0], **ASKED)
    assert [one["tokens"].tolist() for one in first] == [one["tokens"].tolist() for one in every[0]]
    scored = model.score(SOURCES[0], model.decode(best["tokens"]))
    assert torch.equal(scored["tokens"], best["tokens"])
    torch.testing.assert_close(scored["positional_scores"], best["positional_scores"], atol=1e-5, rtol=1e-5)
    assert scored["score"] == pytest.approx(best["score"], abs=1e-5)
    with pytest.raises(ValueError, match="give the sentences and `targets`"):
        model.score(SOURCES[0])


def test_several_translations_and_fairseqs_names_of_options() -> None:
    model = from_pretrained(CHECKPOINTS, "main_dynamic_glu.pt")
    several = model.translate(SOURCES[0], nbest=3, **ASKED)
    assert len(several) == 3
    assert several[0] == model.translate(SOURCES[0], **ASKED)
    assert model.translate(SOURCES[:2], nbest=3, **ASKED)[0] == several
    assert model.sample(SOURCES) == model.translate(SOURCES, beam=1)
    named = model.translate(SOURCES[0], unkpen=0.5, no_repeat_ngram_size=2, max_sentences=4)
    assert named == model.translate(SOURCES[0], unk_penalty=0.5, no_repeat_ngram=2, batch_sentences=4)
    drawn = [model.sample(SOURCES[0], sampling=True, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert model.sample(SOURCES[0], sampling=True, sampling_topk=1) == model.translate(SOURCES[0], beam=1)
    assert model.sample(SOURCES[0], sampling=True, sampling_topk=-1, sampling_topp=-1.0)


def test_the_steps_from_a_sentence_to_tokens(tmp_path: Path) -> None:
    folder = place(tmp_path / "model")
    (folder / "bpecodes").write_text("#version: 0.2\ns 1</w>\n")
    model = from_pretrained(folder, tokenizer="moses", bpe="subword_nmt")
    assert model.tokenize("s1, s2") == "s1 , s2"
    assert model.apply_bpe("s1 s2") == "s1 s@@ 2"
    assert model.remove_bpe("s1 s@@ 2") == "s1 s2"
    plain = from_pretrained(folder)
    assert (plain.tokenize("a, b"), plain.apply_bpe("ab")) == ("a, b", "ab")


def test_languages_are_parts_of_file_names(tmp_path: Path) -> None:
    folder = place(tmp_path / "model")
    for side, language in (("src", "de"), ("tgt", "en")):
        (folder / f"dict.{side}.txt").rename(folder / f"dict.{language}.txt")
    model = from_pretrained(folder, source_lang="de", target_lang="en")
    assert (model.source_lang, model.target_lang) == ("de", "en")
    assert model.translate(SOURCES[0], **ASKED)


def test_a_run_has_the_same_interface(tmp_path: Path) -> None:
    import_checkpoint(CHECKPOINTS / "main_dynamic_glu.pt", tmp_path / "run")
    run = subquad.load_run(tmp_path / "run")
    model = run.hub()
    assert model.translate(SOURCES, **ASKED) == run.translate(SOURCES, **ASKED)
    assert model.eval() is model
    assert model.to("cpu").device.type == "cpu"


def test_language_models_continue_and_score(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, load(min((FOLDER / "fairseq").glob("lm_*.safetensors"))), "args")
    model = from_pretrained(tmp_path)
    assert model.sample("w1 w2", beam=2, max_len_b=6).startswith("w1 w2")
    hypotheses = model.generate(model.encode("w1 w2"), beam=2, max_len_b=6)
    assert len(hypotheses) == 2
    # what it writes with one beam is what scores of every step say
    text = model.sample("w3", max_len_b=4)
    scored = model.score(text)
    words = model.encode("w3").tolist()[:-1]
    ((best,),) = model.generate([words], beam=1, max_len_b=4)
    new = len(best["positional_scores"])
    torch.testing.assert_close(
        scored["positional_scores"][1 : 1 + new], best["positional_scores"], atol=1e-5, rtol=1e-5
    )
    for call in (lambda: model.translate("w1"), lambda: model.score("w1", "w2")):
        with pytest.raises(ValueError, match="a language model"):
            call()


def test_other_files(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt is not a checkpoint of a known program\. .*fairseq \("):
        from_pretrained(tmp_path)


def test_wrong_options_of_translate() -> None:
    model = from_pretrained(CHECKPOINTS, "main_dynamic_glu.pt")
    with pytest.raises(ValueError, match="translate has no option 'len_pen'; did you mean 'lenpen'"):
        model.translate("s1", len_pen=2.0)
    with pytest.raises(ValueError, match="sample has no option 'topk'"):
        model.sample("s1", sampling=True, topk=2)


# ---------------------------------------------------------------------- torch.hub

CALL = """
import json, sys, torch
name, *texts = json.loads(sys.argv[1])
model = torch.hub.load(sys.argv[2], name, source="local", **json.loads(sys.argv[3]))
print(json.dumps([type(model).__module__, model.translate(texts, **json.loads(sys.argv[4]))]))
"""


def hub(home: Path, name: str, texts: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`torch.hub.load` of this checkout in a process of its own."""
    arguments = [json.dumps([name, *texts]), str(ROOT), json.dumps(options), json.dumps(ASKED)]
    environment = {**os.environ, "TORCH_HOME": str(home)}
    command = [sys.executable, "-c", CALL, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=home)


def test_a_published_name_through_torch_hub(tmp_path: Path) -> None:
    place(tmp_path / "subquad" / NAME)
    done = hub(tmp_path, NAME, SOURCES)
    assert done.returncode == 0, done.stderr
    module, texts = json.loads(done.stdout)
    assert module == "subquad.interop.checkpoints.fairseq.hub_interface"
    assert texts == [best["text"] for best in BEST]


def test_a_published_name_without_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"has no model\.pt: download https://dl\.fbaipublicfiles\.com/fairseq/models/"
    ) as no:
        torch.hub.load(str(ROOT), NAME, source="local")
    folder = tmp_path / "subquad" / NAME
    assert f"wmt17.zh-en.dynamicconv-glu.tar.gz -C {folder} --strip-components=1" in str(no.value)
    assert "\n" not in str(no.value)
    assert not list(tmp_path.rglob("*"))  # nothing was fetched


def test_every_published_name_is_an_entry_point() -> None:
    """Entry points are what torch.hub takes for such: everything that can be called, unless its name begins with _."""
    entries = runpy.run_path(str(ROOT / "hubconf.py"))
    found = {name: entry for name, entry in entries.items() if callable(entry) and not name.startswith("_")}
    assert found.keys() == {*PUBLISHED, *EVA}
    for name, archive in PUBLISHED.items():
        assert archive in found[name].__doc__
        mechanism, glu, _, languages = name.split(".")
        kind = archive.removesuffix(".tar.gz").rpartition(".")[2]
        assert kind == (f"{mechanism}-glu" if glu == "glu" else mechanism)
        assert languages in archive


def test_a_wrong_name_lists_the_right_ones() -> None:
    right = r"'lightconv\.glu\.wmt17\.zhen'; did you mean 'lightconv\.glu\.wmt17\.zh-en'\? Names: "
    with pytest.raises(ValueError, match=right) as no:
        torch.hub.load(str(ROOT), "lightconv.glu.wmt17.zhen", source="local")
    assert all(name in str(no.value) for name in (*PUBLISHED, *EVA))
    with pytest.raises(ValueError, match="no published model is called 'lightconv'"):
        load_published("lightconv")


def test_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place(tmp_path / "anywhere")
    model = load_published(NAME, folder, tokenizer=None)
    assert isinstance(model, HubInterface)
    assert model.translate(SOURCES[2], **ASKED) == BEST[2]["text"]
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert published_folder(NAME) == tmp_path / "torch" / "subquad" / NAME
