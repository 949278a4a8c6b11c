"""`subquad.linearise`: takes what a program or a notebook gives, and finds out whether it is a model or a run."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.linearise.estimate import Estimate
from subquad.linearise.options import LineariseOptions, parse_mixer
from subquad.linearise.results import Linearised
from subquad.linearise.run import Linearisation
from subquad.linearise.runs import RunLinearisation
from subquad.train.run_folder import RECIPE


def linearise(
    model: Any,
    mixer: str | Mapping[str, Any],
    data: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path,
    valid: str | Path | Sequence[str | Path] = (),
    tokenizer: Any = None,
    processor: Any = None,
    quiet: bool = False,
    **options: Any,
) -> Linearised:
    """Replaces the attention of a pretrained model, and trains it until it is as good again as it gets.

    model: a causal or masked language model or a classifier of Hugging Face transformers or timm, which is changed in
    place, or its folder, or its name on the hub; or the directory of a run, whose own data is used. mixer: what takes
    the place of attention, such as "eva", with options as "eva=window=64" or {"name": "eva", "window": 64}; a pattern
    such as "eva*3,softmax" keeps the attention of some layers. data: text files, a table or folder of labelled texts, a
    folder of images, or the name of a built-in set. out: the folder of the work, which goes on where it was
    interrupted; it gets the model, its checkpoints and report.json. valid: what is evaluated on; by default a part of
    the data is held out. tokenizer: by default the model's own; "bytes" for a model that reads bytes. processor: of
    images. options: see `LineariseOptions`, such as `tune="lora"` or `keep=2`. An interruption (SIGINT or SIGTERM)
    saves, and then raises KeyboardInterrupt.

    >>> import subquad
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=256, **config))
    >>> short = {"transfer_updates": 2, "tune_updates": 2, "length": 32, "valid_samples": 4, "controls": False}
    >>> short["lengths"] = ()  # without times
    >>> found = subquad.linearise(
    ...     model, "local=window=8", "speeches", tokenizer="bytes", out="runs/local", quiet=True, **short
    ... )
    >>> [row["name"] for row in found.report["scores"]]
    ['teacher', 'swapped', 'transfer', 'finetune']
    """
    return _linearisation(model, mixer, data, out, valid, tokenizer, processor, quiet, options).run()


def linearise_dry_run(
    model: Any,
    mixer: str | Mapping[str, Any],
    data: str | Path | Sequence[str | Path] = (),
    *,
    valid: str | Path | Sequence[str | Path] = (),
    tokenizer: Any = None,
    processor: Any = None,
    **options: Any,
) -> Estimate:
    """Estimates the memory and time of `linearise`, from one update of each stage; nothing is kept or changed."""
    with tempfile.TemporaryDirectory() as scratch:
        return _linearisation(model, mixer, data, scratch, valid, tokenizer, processor, True, options).estimate()


def _linearisation(
    model: Any,
    mixer: str | Mapping[str, Any],
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    valid: str | Path | Sequence[str | Path],
    tokenizer: Any,
    processor: Any,
    quiet: bool,
    options: Mapping[str, Any],
) -> Linearisation:
    choice = parse_mixer(mixer) if isinstance(mixer, str) else dict(mixer)
    read = LineariseOptions.parse("linearise", {"mixer": choice, **options})
    if _is_run(model):
        if data or valid:
            raise ValueError(f"{model} is a run, which learns from its own data; leave data and valid out")
        return RunLinearisation(Path(model), read, Path(out), quiet)
    files, held = (
        [str(one) for one in ([given] if isinstance(given, str | Path) else given)] for given in (data, valid)
    )
    return Linearisation(
        model, read, files, Path(out), valid=held, tokenizer=tokenizer, processor=processor, quiet=quiet
    )


def _is_run(model: Any) -> bool:
    return isinstance(model, str | Path) and (Path(model) / RECIPE).is_file()
