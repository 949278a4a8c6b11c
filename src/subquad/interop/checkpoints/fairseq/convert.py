"""Checkpoints of fairseq, in the layout of 2019 and today's: convolutions and transformers, to translate or to model
language, and the Linformer of its examples, to find hidden words.

    checkpoint.pt                      args or cfg, model, and of training: optimizer_history, extra_state, ...
    dict.de.txt, dict.en.txt           beside it, where the checkpoint says its data is, or named; dict.txt of an LM
    bpecodes or code                   subword-nmt's, beside it or named: with them text goes in and out as words
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.data.tokenizers import Tokenizer
from subquad.data.tokenizers.base import NUM_SPECIAL
from subquad.data.tokenizers.fairseq import FairseqDictionary, MosesTokenizer, SubwordCodes, WordTokenizer
from subquad.files import decode_utf8, read_bytes
from subquad.interop.checkpoints.fairseq import models as fairseq_models
from subquad.interop.checkpoints.fairseq.optimizer import moments_of
from subquad.interop.checkpoints.fairseq.settings import Sections, Settings, sections_of, settings_of
from subquad.interop.checkpoints.linformer import roberta as linformer_roberta
from subquad.interop.checkpoints.run import ImportedRun, TextFiles
from subquad.models import MaskedLanguageModel, Model, Seq2Seq

FAMILIES = ("lightconv_lm", "lightconv", "transformer_lm", "transformer", "linformer_roberta")
"""What the names of supported architectures are or begin with."""
TASKS = {
    "translation": "translation",
    "language_modeling": "language-model",
    "masked_lm": "masked-language-model",
}
"""fairseq's names and ours."""
CODES = ("bpecodes", "code")
"""What the published models call their file of codes."""
SUPPORTED = f"fairseq ({', '.join(FAMILIES)}; tasks {', '.join(TASKS)})"


def recognises(contents: Any) -> bool:
    """Whether a file is a checkpoint of fairseq, of any architecture."""
    if not isinstance(contents, Mapping) or not isinstance(contents.get("model"), Mapping):
        return False
    if isinstance(contents.get("cfg"), Mapping):
        return {"model", "task"} <= contents["cfg"].keys()
    return all(hasattr(contents.get("args"), name) for name in ("arch", "task"))


def convert(contents: Mapping[str, Any], folder: Path, texts: TextFiles) -> ImportedRun:
    """The checkpoint as a run of ours; what is not supported is refused by name."""
    settings = settings_of(contents)
    _check(settings)
    state: Mapping[str, Tensor] = contents["model"]
    masked = TASKS[settings.all["task"]] == "masked-language-model"
    try:
        found = (linformer_roberta if masked else fairseq_models).model_from(settings.model, state)
    except KeyError as error:
        raise ValueError(f"{settings.architecture} is incomplete: it has no option or weight {error}") from error
    history = contents.get("optimizer_history") or [{}]
    update = int(history[-1].get("num_updates", 0))
    sections = sections_of(settings.all, update)
    # fairseq numbers moments without frozen weights, and counts shared ones once: not followed for the Linformer
    moments = None if masked else moments_of(contents.get("last_optimizer_state"), state, found)
    if moments is None or sections.recipe["optim"]["name"] != "adam":
        sections.notes.append("no state of the optimiser is taken: training goes on with a fresh one")
        moments = {}
    return ImportedRun(
        origin=f"fairseq, {settings.architecture}",
        task=TASKS[settings.all["task"]],
        model=found.module,
        tokenizers=_tokenizers(found.module, settings, folder, texts, sections),
        recipe=sections.recipe,
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
    """Epochs that are done; the iterator counts from 1, and one that stands within an epoch begins it anew."""
    iterator = extra.get("train_iterator") or {}
    return max(0, int(iterator.get("epoch", extra.get("epoch", 1))) - 1)


# ---------------------------------------------------------------------- text


def _tokenizers(
    model: Model, settings: Settings, folder: Path, texts: TextFiles, sections: Sections
) -> dict[str, Tokenizer]:
    """The tokenizers of both sides, or of a language model's text. What one should know of them is noted."""
    places = [folder, *(Path(path) for path in _data_folders(settings.all.get("data")))]
    codes = _codes(places, texts)
    if codes is None:
        sections.notes.append("no BPE codes: text goes in and comes out in the pieces of the dictionaries; see --codes")
    if not isinstance(model, Seq2Seq):
        if texts.dict_target is not None:
            raise ValueError("a language model has one dictionary: name it with --dict-source alone")
        size = model.config.vocab - isinstance(model, MaskedLanguageModel)  # what hides words is in no dictionary
        dictionary = _dictionary("dict.txt", texts.dict_source, "--dict-source", places, size)
        if codes is None and all(symbol.isdigit() for symbol in dictionary.symbols[NUM_SPECIAL:]):
            sections.notes.append(
                "the dictionary's pieces are numbers, as of GPT-2's BPE: text goes in as such numbers"
            )
        return {"text": _tokenizer(dictionary, codes, None)}
    sides = {
        "source": ("source_lang", texts.dict_source, "--dict-source", model.config.source_vocab),
        "target": ("target_lang", texts.dict_target, "--dict-target", model.config.target_vocab),
    }
    found = {}
    for side, (key, named, option, size) in sides.items():
        language = settings.all.get(key)
        dictionary = _dictionary(f"dict.{language}.txt", named, option, places, size)
        found[side] = _tokenizer(dictionary, codes, language if texts.moses else None)
    return found


def _data_folders(given: Any) -> Iterator[str]:
    """The folders of the data: a list, or names with colons between them."""
    for path in given if isinstance(given, list | tuple) else [given]:
        yield from filter(None, str(path or "").split(":"))


def _dictionary(name: str, named: Path | None, option: str, places: list[Path], size: int) -> FairseqDictionary:
    """The dictionary of `size` symbols: the named one, or the first that lies in one of the places."""
    path = named or next((place / name for place in places if (place / name).is_file()), None)
    if path is None:
        tried = " or ".join(str(place) for place in places)
        raise ValueError(f"there is no {name} in {tried}: put it beside the checkpoint, or name it with {option}")
    dictionary = FairseqDictionary.load(path)
    if len(dictionary) != size:
        raise ValueError(
            f"{path} has {len(dictionary)} symbols, special ones included; the model has {size}: it is the dictionary "
            f"of another model; name the right one with {option}"
        )
    return dictionary


def _codes(places: list[Path], texts: TextFiles) -> str | None:
    if texts.pieces:
        return None
    path = texts.codes or next((place / name for place in places for name in CODES if (place / name).is_file()), None)
    if path is None:
        return None
    codes = decode_utf8(read_bytes(path), str(path))
    SubwordCodes(codes, str(path))  # others, such as fastBPE's with a third column, are refused by the file's name
    return codes


def _tokenizer(dictionary: FairseqDictionary, codes: str | None, language: str | None) -> Tokenizer:
    return WordTokenizer(dictionary) if codes is None else MosesTokenizer(codes, dictionary, language)
