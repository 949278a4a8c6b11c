"""Loads translation models of fairseq as Python objects with the interface of fairseq's own.

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
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from subquad.data.tokenizers import Tokenizer
from subquad.decode.options import DecodeOptions
from subquad.decode.translate import Translator
from subquad.interop.checkpoints import convert_checkpoint
from subquad.interop.checkpoints.fairseq.convert import CODES
from subquad.interop.checkpoints.run import ConvertedRun, TextFiles
from subquad.models import Seq2Seq

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


class HubTranslator(nn.Module):
    """A model or an ensemble with its tokenizers. `to`, `cuda` and `half` apply to all models."""

    def __init__(self, models: Sequence[Seq2Seq], source: Tokenizer, target: Tokenizer) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.source, self.target = source, target
        self._translator: Translator | None = None
        self.eval()

    @overload
    def translate(self, sentences: str, beam: int = 5, **options: Any) -> str: ...

    @overload
    def translate(self, sentences: Sequence[str], beam: int = 5, **options: Any) -> list[str]: ...

    def translate(self, sentences: str | Sequence[str], beam: int = 5, **options: Any) -> str | list[str]:
        """Returns the best translation of a sentence, or of each. options: those of the recipe section `decode`."""
        if "nbest" in options:
            raise ValueError("translate gives only the best translation; `subquad translate --nbest` gives several")
        chosen = DecodeOptions.parse("translate", {"beam": beam, **options})
        if self._translator is None or self._translator.options != chosen:
            models = [model for model in self.models if isinstance(model, Seq2Seq)]
            self._translator = Translator(models, self.source, self.target, chosen)
        texts = [sentences] if isinstance(sentences, str) else sentences
        found = [translated.text for translated in self._translator.translate(texts)]
        return found[0] if isinstance(sentences, str) else found

    def encode(self, sentence: str) -> Tensor:
        """Returns the token ids of a source sentence, with eos, (T,) int64."""
        return torch.tensor([*self.source.encode(sentence), self.source.eos])

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Returns the target sentence of token ids."""
        return self.target.decode(torch.as_tensor(tokens).tolist())

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """Forgets the translator, because `to`, `cuda` and `half`, which call this, move the models."""
        self._translator = None
        return super()._apply(*arguments, **options)


def from_pretrained(
    folder: str | Path,
    checkpoint_file: str = CHECKPOINT,
    data_name_or_path: str | Path = ".",
    *,
    tokenizer: str | None = None,
    bpe: str | None = None,
    bpe_codes: str | Path | None = None,
) -> HubTranslator:
    """Loads the translation model of a fairseq checkpoint in a folder.

    checkpoint_file: several files, separated by colons, form an ensemble. data_name_or_path: the folder of the
    dictionaries; a path that begins with a dot is relative to `folder`. tokenizer: "moses", or None for text that is
    tokenised. bpe: "subword_nmt", with the codes of bpe_codes or of the file bpecodes or code in `folder` or beside the
    dictionaries. None: the text is in pieces of the dictionaries.
    """
    folder, data = Path(folder), str(data_name_or_path)
    folders = [folder, folder / data if data.startswith(".") else Path(data)]
    # Codes beside the model are used, and even read, only if the caller asks for BPE.
    texts = TextFiles(codes=_find_codes(folders, bpe, bpe_codes), moses=_uses_moses(tokenizer, bpe), pieces=bpe is None)
    converted = [_load_checkpoint(folder / name, folders[-1], texts) for name in checkpoint_file.split(os.pathsep)]
    first = converted[0].tokenizers
    models = [one.model for one in converted if isinstance(one.model, Seq2Seq)]
    return HubTranslator(models, first["source"], first["target"])


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
    if not isinstance(found.model, Seq2Seq):
        raise ValueError(f"{path} is a model of {found.task}; only models of translation translate")
    return found


# ---------------------------------------------------------------------- published models


def published_folder(name: str) -> Path:
    """Returns the folder in which a published model is expected."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "torch"
    return Path(os.environ.get("TORCH_HOME", cache)).expanduser() / "subquad" / name


def load_published(name: str, folder: str | Path | None = None, **options: Any) -> HubTranslator:
    """Loads a published model. folder: where its archive was unpacked. options: those of `from_pretrained`."""
    place = Path(folder) if folder is not None else published_folder(name)
    given = {"checkpoint_file": CHECKPOINT, "tokenizer": TOKENIZER, "bpe": BPE, **options}
    for file in given["checkpoint_file"].split(os.pathsep):
        if not (place / file).is_file():
            archive = PUBLISHED[name]
            raise ValueError(
                f"{place} has no {file}: download {ADDRESS}/{archive} and unpack it there "
                f"(mkdir -p {place} && tar -xzf {archive} -C {place} --strip-components=1), or name another folder=..."
            )
    return from_pretrained(place, **given)


def entry_points() -> dict[str, Callable[..., HubTranslator]]:
    """Returns a function for each published model, as torch.hub calls them."""
    return {name: _entry_point(name) for name in PUBLISHED}


def _entry_point(name: str) -> Callable[..., HubTranslator]:
    def load(folder: str | Path | None = None, **options: Any) -> HubTranslator:
        return load_published(name, folder, **options)

    load.__name__ = name
    load.__doc__ = f"""Loads fairseq's published model {name}, whose archive {PUBLISHED[name]} was unpacked before.

    folder: where it was unpacked. By default it is TORCH_HOME/subquad/{name}. The other options are those of
    `from_pretrained`; by default tokenizer is "moses" and bpe is "subword_nmt".
    """
    return load
