"""Loads checkpoints of fairseq as Python objects with the interface of fairseq's own (`HubInterface`).

    from subquad.interop.checkpoints.fairseq.hub import from_pretrained
    model = from_pretrained("checkpoints", checkpoint_file="checkpoint_best.pt", data_name_or_path="data-bin/en_fr",
                            bpe="subword_nmt", bpe_codes="data-bin/en_fr/code")
    model.translate("Hello world !")

    model = torch.hub.load("path/of/subquad", "lightconv.glu.wmt17.zh-en", source="local")

Published models are read from TORCH_HOME/subquad/NAME, or from a folder that the caller names. Nothing is downloaded.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from subquad.config import nearest
from subquad.interop.checkpoints import convert_checkpoint
from subquad.interop.checkpoints.fairseq.convert import CODES
from subquad.interop.checkpoints.fairseq.hub_interface import HubInterface
from subquad.interop.checkpoints.run import ConvertedRun, TextFiles
from subquad.models import LanguageModel, Seq2Seq

CHECKPOINT = "model.pt"
BPE, TOKENIZER = "subword_nmt", "moses"
ADDRESS = "https://dl.fbaipublicfiles.com/fairseq/models/dynamicconv"
PUBLISHED = {
    "lightconv.no_glu.iwslt14.de-en": "iwslt14.de-en.lightconv.tar.gz",
    "dynamicconv.no_glu.iwslt14.de-en": "iwslt14.de-en.dynamicconv.tar.gz",
    "lightconv.no_glu.wmt16.en-de": "wmt16.en-de.joined-dict.lightconv.tar.gz",
    "dynamicconv.no_glu.wmt16.en-de": "wmt16.en-de.joined-dict.dynamicconv.tar.gz",
    "lightconv.glu.wmt16.en-de": "wmt16.en-de.joined-dict.lightconv-glu.tar.gz",
    "dynamicconv.glu.wmt16.en-de": "wmt16.en-de.joined-dict.dynamicconv-glu.tar.gz",
    "lightconv.glu.wmt17.en-de": "wmt16.en-de.joined-dict.lightconv-glu.tar.gz",
    "dynamicconv.glu.wmt17.en-de": "wmt16.en-de.joined-dict.dynamicconv-glu.tar.gz",
    "lightconv.glu.wmt14.en-fr": "wmt14.en-fr.joined-dict.lightconv-glu.tar.gz",
    "dynamicconv.glu.wmt14.en-fr": "wmt14.en-fr.joined-dict.dynamicconv-glu.tar.gz",
    "lightconv.glu.wmt17.zh-en": "wmt17.zh-en.lightconv-glu.tar.gz",
    "dynamicconv.glu.wmt17.zh-en": "wmt17.zh-en.dynamicconv-glu.tar.gz",
}
"""The archives of the models that fairseq published, by name. Two names can stand for the same archive."""
EVA = (
    "wikitext103-eva-16layers-lm",
    "wikitext103-eva-32layers-lm",
    "wmt14ende-eva-e32_c8-mt",
    "wmt14ende-eva-e8_c8-mt",
)
"""The checkpoints that the authors of EVA published, each a file; dictionaries are those of its data."""


def from_pretrained(
    folder: str | Path,
    checkpoint_file: str = CHECKPOINT,
    data_name_or_path: str | Path = ".",
    *,
    tokenizer: str | None = None,
    bpe: str | None = None,
    bpe_codes: str | Path | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> HubInterface:
    """Loads the model of a fairseq checkpoint in a folder, which translates or continues text.

    checkpoint_file: several files, separated by colons, form an ensemble. data_name_or_path: the folder of the
    dictionaries; a path that begins with a dot is relative to `folder`. tokenizer: "moses", or None for text that is
    tokenised. bpe: "subword_nmt", with the codes of bpe_codes or of the file bpecodes or code in `folder` or beside the
    dictionaries. None: the text is in pieces of the dictionaries. source_lang, target_lang: the languages, which are
    parts of the names of dictionaries; by default those of the checkpoint.
    """
    folder, data = Path(folder), str(data_name_or_path)
    folders = [folder, folder / data if data.startswith(".") else Path(data)]
    # Codes beside the model are used, and even read, only if the caller asks for BPE.
    texts = TextFiles(
        codes=_find_codes(folders, bpe, bpe_codes),
        moses=_uses_moses(tokenizer, bpe),
        pieces=bpe is None,
        languages=(source_lang, target_lang),
    )
    converted = [_load_checkpoint(folder / name, folders[-1], texts) for name in checkpoint_file.split(os.pathsep)]
    if len(kinds := {one.task for one in converted}) > 1:
        raise ValueError(f"{checkpoint_file}: models of {' and '.join(sorted(kinds))} are no ensemble")
    models: Any = [one.model for one in converted]
    return HubInterface(models, converted[0].tokenizers, source_lang, target_lang)


def _uses_moses(tokenizer: str | None, bpe: str | None) -> bool:
    if tokenizer not in (None, TOKENIZER):
        raise ValueError(f"tokenizer {tokenizer!r} is not supported; it is {TOKENIZER!r}, or None for tokenised text")
    if tokenizer is not None and bpe is None:
        raise ValueError(f"tokenizer {tokenizer!r} comes before bpe={BPE!r}: give that too")
    return tokenizer is not None


def _find_codes(folders: Sequence[Path], bpe: str | None, named: str | Path | None) -> Path | None:
    """Returns the file of codes, or None without BPE."""
    if bpe not in (None, BPE):
        raise ValueError(f"bpe {bpe!r} is not supported; it is {BPE!r}, or None for text in pieces")
    if bpe is None:
        if named is not None:
            raise ValueError(f"bpe_codes are for bpe={BPE!r}: give that too")
        return None
    known = [folder / name for folder in folders for name in CODES]
    path = Path(named) if named is not None else next((path for path in known if path.is_file()), None)
    if path is None:
        raise ValueError(f"{folders[0]} has neither {' nor '.join(CODES)}: name the codes of {bpe} with bpe_codes")
    return path


def _load_checkpoint(path: Path, data: Path, texts: TextFiles) -> ConvertedRun:
    found = convert_checkpoint(path, texts, data)
    if not isinstance(found.model, Seq2Seq | LanguageModel):
        raise ValueError(f"{path} is a model of {found.task}; only models of translation and of language write text")
    return found


# ---------------------------------------------------------------------- published models


def published_folder(name: str) -> Path:
    """Returns the folder in which a published model is expected."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "torch"
    return Path(os.environ.get("TORCH_HOME", cache)).expanduser() / "subquad" / name


def load_published(name: str, folder: str | Path | None = None, **options: Any) -> HubInterface:
    """Loads a published model. folder: where its files are. options: those of `from_pretrained`."""
    check_name(name)
    place = Path(folder) if folder is not None else published_folder(name)
    if name in EVA:
        return from_pretrained(place, **_eva_options(name, place, options))
    given = {"checkpoint_file": CHECKPOINT, "tokenizer": TOKENIZER, "bpe": BPE, **options}
    for file in given["checkpoint_file"].split(os.pathsep):
        if not (place / file).is_file():
            archive = PUBLISHED[name]
            raise ValueError(
                f"{place} has no {file}: download {ADDRESS}/{archive} and unpack it there "
                f"(mkdir -p {place} && tar -xzf {archive} -C {place} --strip-components=1), or name another folder=..."
            )
    return from_pretrained(place, **given)


def check_name(name: str) -> None:
    """Raises a ValueError with all names if none of the published models is called so."""
    if name not in (names := [*PUBLISHED, *EVA]):
        raise ValueError(f"no published model is called {name!r}{nearest(name, names)} Names: {', '.join(names)}.")


def _eva_options(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The only checkpoint of the folder, and BPE if its codes are there, unless the caller says otherwise."""
    files = sorted(path.name for path in folder.glob("*.pt"))
    if "checkpoint_file" not in options and len(files) != 1:
        raise ValueError(
            f"{folder} has {len(files)} files *.pt, and {name} is one: put the checkpoint that its authors published "
            f"(https://github.com/HKUNLP/efficient-attention) there, and the dictionaries of its data beside it, or "
            "name another folder=..."
        )
    has_codes = any((folder / codes).is_file() for codes in CODES)
    return {"checkpoint_file": files[0] if files else "", "bpe": BPE if has_codes else None, **options}


def entry_points() -> dict[str, Callable[..., HubInterface]]:
    """Returns a function for each published model, as torch.hub calls them."""
    return {name: _entry_point(name) for name in (*PUBLISHED, *EVA)}


def _entry_point(name: str) -> Callable[..., HubInterface]:
    def load(folder: str | Path | None = None, **options: Any) -> HubInterface:
        return load_published(name, folder, **options)

    if name in EVA:
        what, usual = f"EVA's published model {name}", "bpe is that of the codes in the folder, if there are any"
    else:
        what = f"fairseq's published model {name}, whose archive {PUBLISHED[name]} was unpacked before"
        usual = 'tokenizer is "moses" and bpe is "subword_nmt"'
    load.__name__ = name
    load.__doc__ = f"""Loads {what}.

    folder: where its files are. By default it is TORCH_HOME/subquad/{name}. The other options are those of
    `from_pretrained`; by default {usual}.
    """
    return load
