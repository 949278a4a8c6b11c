"""fairseq's translation models as Python objects, called as fairseq's own were.

    from subquad.interop.checkpoints.fairseq.hub import from_pretrained
    model = from_pretrained("checkpoints", checkpoint_file="checkpoint_best.pt", data_name_or_path="data-bin/en_fr",
                            bpe="subword_nmt", bpe_codes="data-bin/en_fr/code")
    model.translate("Hello world !")

    model = torch.hub.load("path/of/subquad", "lightconv.glu.wmt17.zh-en", source="local")

The published models are read from TORCH_HOME/subquad/NAME, or from a folder that is named. Nothing is downloaded.
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
from subquad.interop.checkpoints.fairseq.convert import CODES
from subquad.interop.checkpoints.registry import convert_checkpoint
from subquad.interop.checkpoints.run import ImportedRun, TextFiles
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
"""Archives by the names under which fairseq published their models; two names stand for the same archive."""


class HubTranslator(nn.Module):
    """One model, or an ensemble, with the text processing around it. `to`, `cuda` and `half` move all models."""

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
        """The best translation of a sentence, or of each. options: those of a recipe's section `decode`."""
        if "nbest" in options:
            raise ValueError("translate gives the best translation alone; `subquad translate --nbest` gives several")
        chosen = DecodeOptions.parse("translate", {"beam": beam, **options})
        if self._translator is None or self._translator.options != chosen:
            models = [model for model in self.models if isinstance(model, Seq2Seq)]
            self._translator = Translator(models, self.source, self.target, chosen)
        texts = [sentences] if isinstance(sentences, str) else sentences
        found = [translated.text for translated in self._translator.lines(texts)]
        return found[0] if isinstance(sentences, str) else found

    def encode(self, sentence: str) -> Tensor:
        """(T,) int64: the numbers of a source sentence with its end."""
        return torch.tensor([*self.source.encode(sentence), self.source.eos])

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """The target sentence of numbers."""
        return self.target.decode(torch.as_tensor(tokens).tolist())

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """What `to`, `cuda` and `half` call: a translator of models that move is out of date."""
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
    """The translation model of fairseq's checkpoint in a folder.

    checkpoint_file: several, separated by colons, are an ensemble. data_name_or_path: where the dictionaries are; what
    begins with a dot is meant from `folder`. tokenizer: "moses", or None for text that is tokenised. bpe:
    "subword_nmt", with the codes of bpe_codes, or of the file bpecodes or code in `folder` or beside the dictionaries;
    None: text is in the pieces of the dictionaries.
    """
    folder, data = Path(folder), str(data_name_or_path)
    places = [folder, folder / data if data.startswith(".") else Path(data)]
    # Codes that lie beside the model are not used, or even read, without being asked for.
    texts = TextFiles(codes=_codes(places, bpe, bpe_codes), moses=_moses(tokenizer, bpe), pieces=bpe is None)
    loaded = [_loaded(folder / name, places[-1], texts) for name in checkpoint_file.split(os.pathsep)]
    first = loaded[0].tokenizers
    models = [one.model for one in loaded if isinstance(one.model, Seq2Seq)]
    return HubTranslator(models, first["source"], first["target"])


def _moses(tokenizer: str | None, bpe: str | None) -> bool:
    if tokenizer not in (None, TOKENIZER):
        raise ValueError(f"tokenizer {tokenizer!r} is not supported; it is {TOKENIZER!r}, or None for tokenised text")
    if tokenizer is not None and bpe is None:
        raise ValueError(f"tokenizer {tokenizer!r} comes before bpe={BPE!r}: give that too")
    return tokenizer is not None


def _codes(places: Sequence[Path], bpe: str | None, named: str | Path | None) -> Path | None:
    """The file of codes; None without BPE."""
    if bpe not in (None, BPE):
        raise ValueError(f"bpe {bpe!r} is not supported; it is {BPE!r}, or None for text in pieces")
    if bpe is None:
        if named is not None:
            raise ValueError(f"bpe_codes are for bpe={BPE!r}: give that too")
        return None
    known = [place / name for place in places for name in CODES]
    path = Path(named) if named is not None else next((path for path in known if path.is_file()), None)
    if path is None:
        raise ValueError(f"{places[0]} has neither {' nor '.join(CODES)}: name the codes of {bpe} with bpe_codes")
    return path


def _loaded(path: Path, data: Path, texts: TextFiles) -> ImportedRun:
    found = convert_checkpoint(path, texts, data)
    if not isinstance(found.model, Seq2Seq):
        raise ValueError(f"{path} is a model of {found.task}; only models of translation translate")
    return found


# ---------------------------------------------------------------------- published models


def published_folder(name: str) -> Path:
    """Where a published model is looked for."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "torch"
    return Path(os.environ.get("TORCH_HOME", cache)).expanduser() / "subquad" / name


def load_published(name: str, folder: str | Path | None = None, **options: Any) -> HubTranslator:
    """A published model. folder: where its archive was unpacked; options: those of `from_pretrained`."""
    place = Path(folder) if folder is not None else published_folder(name)
    given = {"checkpoint_file": CHECKPOINT, "tokenizer": TOKENIZER, "bpe": BPE, **options}
    for file in given["checkpoint_file"].split(os.pathsep):
        if not (place / file).is_file():
            archive = PUBLISHED[name]
            raise ValueError(
                f"{place} has no {file}: fetch {ADDRESS}/{archive} and unpack it there "
                f"(mkdir -p {place} && tar -xzf {archive} -C {place} --strip-components=1), or name another folder=..."
            )
    return from_pretrained(place, **given)


def entry_points() -> dict[str, Callable[..., HubTranslator]]:
    """A function for every published model, as torch.hub calls them."""
    return {name: _entry_point(name) for name in PUBLISHED}


def _entry_point(name: str) -> Callable[..., HubTranslator]:
    def load(folder: str | Path | None = None, **options: Any) -> HubTranslator:
        return load_published(name, folder, **options)

    load.__name__ = name
    load.__doc__ = f"""fairseq's published model {name}, whose archive {PUBLISHED[name]} was unpacked before.

    folder: where it was unpacked; default: TORCH_HOME/subquad/{name}. Other options are those of
    `from_pretrained`; tokenizer is "moses" and bpe "subword_nmt" unless they are given.
    """
    return load
