"""Converts checkpoints of fairseq, in the layout of 2019 and in today's.

    checkpoint.pt                 args or cfg, model, and the state of training: optimizer_history, extra_state, ...
    dict.de.txt, dict.en.txt      the dictionaries, beside the checkpoint, in its data folder, or named by the user;
                                  a language model has one dict.txt
    bpecodes or code              codes of subword-nmt, beside the checkpoint or named; with them text goes in and
                                  comes out as words

Convolutions and transformers that translate or model language are supported, and the Linformer of fairseq's examples,
which is a masked language model.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from subquad.data.fairseq.folder import FairseqFolder
from subquad.data.tokenizers import NUM_SPECIAL, Tokenizer
from subquad.data.tokenizers.fairseq import FairseqDictionary, MosesTokenizer, SubwordCodes, WordTokenizer
from subquad.files import decode_utf8, read_bytes
from subquad.interop.checkpoints.fairseq import models, roberta
from subquad.interop.checkpoints.fairseq.optimizer import convert_optimizer_state
from subquad.interop.checkpoints.fairseq.settings import Sections, Settings, read_settings, recipe_sections
from subquad.interop.checkpoints.run import ConvertedRun, TextFiles
from subquad.models import MaskedLanguageModel, Model, Seq2Seq

FAMILIES = ("lightconv_lm", "lightconv", "transformer_lm", "transformer", "linformer_roberta")
"""The names of supported architectures, or how they begin."""
TASKS = {
    "translation": "translation",
    "language_modeling": "language-model",
    "masked_lm": "masked-language-model",
}
"""From fairseq's names of tasks to ours."""
LANGUAGE = re.compile(r"[\w.@+-]{1,80}")
CODES = ("bpecodes", "code")
"""The names that published models give to their file of codes."""
SUPPORTED = f"fairseq ({', '.join(FAMILIES)}; tasks {', '.join(TASKS)})"


def recognises(contents: Any) -> bool:
    """Whether this is a checkpoint of fairseq, of any architecture."""
    if not isinstance(contents, Mapping) or not isinstance(contents.get("model"), Mapping):
        return False
    if isinstance(contents.get("cfg"), Mapping):
        return {"model", "task"} <= contents["cfg"].keys()
    return all(hasattr(contents.get("args"), name) for name in ("arch", "task"))


def convert(contents: Mapping[str, Any], folder: Path, texts: TextFiles) -> ConvertedRun:
    """Converts a checkpoint to a run of ours. What is not supported is refused by name."""
    settings = read_settings(contents)
    _check(settings)
    state: Mapping[str, Tensor] = contents["model"]
    masked = TASKS[settings.all["task"]] == "masked-language-model"
    try:
        found = (roberta if masked else models).convert_model(settings.model, state)
    except KeyError as error:
        raise ValueError(f"{settings.architecture} is incomplete: it has no option or weight {error}") from error
    history = contents.get("optimizer_history") or [{}]
    update = int(history[-1].get("num_updates", 0))
    sections = recipe_sections(settings.all, update)
    # The Linformer has frozen and shared weights, which fairseq numbers in ways that are not followed here.
    moments = None if masked else convert_optimizer_state(contents.get("last_optimizer_state"), state, found)
    if moments is None or sections.recipe["optim"]["name"] != "adam":
        sections.notes.append("the state of the optimiser is not converted: training continues with a fresh one")
        moments = {}
    dictionaries = _load_dictionaries(found.module, settings, folder, texts)
    return ConvertedRun(
        origin=f"fairseq, {settings.architecture}",
        task=TASKS[settings.all["task"]],
        model=found.module,
        tokenizers=_tokenizers(dictionaries, _folders(settings, folder), texts, sections),
        recipe=sections.recipe,
        data=_find_data([one.path.parent for one in dictionaries.values()], settings),
        optimizer=moments,
        update=update,
        epoch=_epochs(contents.get("extra_state") or {}),
        notes=sections.notes,
    )


def _check(settings: Settings) -> None:
    name, task = settings.architecture, settings.all.get("task")
    if not any(name == family or name.startswith(f"{family}_") for family in FAMILIES):
        raise ValueError(f"fairseq's architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    if task not in TASKS:
        raise ValueError(f"fairseq's task {task!r} is not supported; supported: {', '.join(TASKS)}")
    if (task == "masked_lm") != name.startswith("linformer_roberta"):
        raise ValueError(f"fairseq's {name} for task {task} is not supported; masked_lm is, with linformer_roberta")
    if settings.model.get("cross_self_attention"):
        raise ValueError(f"{name} with cross_self_attention is not supported; without it, {name} is")


def _epochs(extra: Mapping[str, Any]) -> int:
    """Returns how many epochs are done. fairseq counts from 1; an epoch that was interrupted begins again."""
    iterator = extra.get("train_iterator") or {}
    return max(0, int(iterator.get("epoch", extra.get("epoch", 1))) - 1)


# ---------------------------------------------------------------------- text


class DictionaryFile(NamedTuple):
    """A dictionary, the file that it was read from, and the language of its text; a language model has none."""

    dictionary: FairseqDictionary
    path: Path
    language: str | None = None


def _folders(settings: Settings, folder: Path) -> list[Path]:
    """Where files are looked for: beside the checkpoint, and in the data folders that it names."""
    return [folder, *(Path(path) for path in _data_folders(settings.all.get("data")))]


def _data_folders(given: Any) -> Iterator[str]:
    """Yields the data folders of a checkpoint: a list of names, or names with colons between them."""
    for path in given if isinstance(given, list | tuple) else [given]:
        yield from filter(None, str(path or "").split(":"))


def _load_dictionaries(model: Model, settings: Settings, folder: Path, texts: TextFiles) -> dict[str, DictionaryFile]:
    """Returns the dictionaries of source and target, or of the text."""
    folders = _folders(settings, folder)
    if not isinstance(model, Seq2Seq):
        if texts.dict_target is not None:
            raise ValueError("a language model has one dictionary: name it with --dict-source alone")
        size = model.config.vocab - isinstance(model, MaskedLanguageModel)  # the mask token is in no dictionary
        return {"text": _load_dictionary("dict.txt", texts.dict_source, "--dict-source", folders, size)}
    fields = {
        "source": ("source_lang", texts.dict_source, "--dict-source", model.config.source_vocab),
        "target": ("target_lang", texts.dict_target, "--dict-target", model.config.target_vocab),
    }
    found = {}
    for (field, (key, named, option, size)), given in zip(fields.items(), texts.languages, strict=True):
        language = given or settings.all.get(key)
        if not LANGUAGE.fullmatch(str(language)):  # it is a part of a file name, and must not lead to another folder
            raise ValueError(f"{key} is {str(language)[:80]!r}, which is no name of a language")
        one = _load_dictionary(f"dict.{language}.txt", named, option, folders, size)
        found[field] = one._replace(language=language)
    return found


def _load_dictionary(name: str, named: Path | None, option: str, folders: list[Path], size: int) -> DictionaryFile:
    """Loads the dictionary that the user named, or the first in one of the folders; it must have `size` symbols."""
    path = named or next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        tried = " or ".join(str(folder) for folder in folders)
        raise ValueError(f"there is no {name} in {tried}; put it beside the checkpoint, or name it with {option}")
    dictionary = FairseqDictionary.load(path)
    if len(dictionary) != size:
        raise ValueError(
            f"{path} has {len(dictionary)} symbols, special ones included, but the model has {size}. It belongs to "
            f"another model; name the right one with {option}"
        )
    return DictionaryFile(dictionary, path)


def _find_data(folders: list[Path], settings: Settings) -> dict[str, Any] | None:
    """Returns the section `data` of the folder that all dictionaries are in, if it has binarised data, too."""
    languages = [settings.all.get(key) for key in ("source_lang", "target_lang")] if len(folders) > 1 else None
    options = {"path": str(folders[0].resolve()), "languages": languages}
    try:
        FairseqFolder.parse("data", options).text_config("text" if languages is None else "pairs")
    except ValueError:
        return None
    return {"fairseq": options} if len(set(folders)) == 1 else None


def _tokenizers(
    dictionaries: Mapping[str, DictionaryFile], folders: list[Path], texts: TextFiles, sections: Sections
) -> dict[str, Tokenizer]:
    """Returns the tokenizers of source and target, or of the text, and adds notes about them to `sections`."""
    codes = _load_codes(folders, texts)
    if texts.remove_bpe is not None:
        sections.recipe["decode"]["remove_bpe"] = texts.remove_bpe
    if codes is None:
        comes_out = "and comes out in pieces of the dictionaries; see --codes and --remove-bpe"
        if texts.remove_bpe is not None:
            comes_out = "in pieces of the dictionaries, and comes out in words"
        sections.notes.append(f"there are no BPE codes: text goes in {comes_out}")
    symbols = [symbol for one in dictionaries.values() for symbol in one.dictionary.symbols[NUM_SPECIAL:]]
    if codes is None and "text" in dictionaries and all(symbol.isdigit() for symbol in symbols):
        sections.notes.append(
            "the pieces of the dictionary are numbers, as of GPT-2's BPE: text goes in as such numbers"
        )
    return {
        field: _tokenizer(one.dictionary, codes, one.language if texts.moses else None)
        for field, one in dictionaries.items()
    }


def _load_codes(folders: list[Path], texts: TextFiles) -> str | None:
    if texts.pieces:
        return None
    path = texts.codes or next(
        (folder / name for folder in folders for name in CODES if (folder / name).is_file()), None
    )
    if path is None:
        return None
    codes = decode_utf8(read_bytes(path), str(path))
    SubwordCodes(
        codes, str(path)
    )  # other formats, such as fastBPE's with a third column, are refused here, where the file has a name
    return codes


def _tokenizer(dictionary: FairseqDictionary, codes: str | None, language: str | None) -> Tokenizer:
    return WordTokenizer(dictionary) if codes is None else MosesTokenizer(codes, dictionary, language)
