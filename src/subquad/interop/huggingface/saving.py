"""Saves a run in the format of Hugging Face: weights, tokenizers or an image processor, and a model card."""

from pathlib import Path
from typing import Any

import yaml
from transformers import GenerationConfig

from subquad.decode.limits import max_source_length, max_text_length
from subquad.files import new_folder
from subquad.interop.export.card import CARD, model_card, shorten_paths
from subquad.interop.export.files import copy_inputs
from subquad.interop.huggingface.base import SubquadModel
from subquad.interop.huggingface.config import SubquadConfig
from subquad.interop.huggingface.encoders import SubquadForMaskedLM, SubquadForSequenceClassification
from subquad.interop.huggingface.images import SubquadForImageClassification, SubquadImageProcessor
from subquad.interop.huggingface.text import SubquadForCausalLM, SubquadForSeq2SeqLM, SubquadGenerator
from subquad.interop.huggingface.tokenizer import convert_tokenizer
from subquad.models import Model, TextClassifier
from subquad.tasks.masked_language_model import beginning
from subquad.tasks.text_classification import WITH_EOS, TextClassificationData, max_tokens
from subquad.train.run import LoadedRun
from subquad.train.run_folder import RECIPE

TARGET = "target"
"""The subfolder of the target's tokenizer, because a folder has only one tokenizer."""
LONG_SOURCE = 512
"""The length of a long source. transformers has only fixed limits, and ours may grow with the source."""
WRAPPERS: tuple[type[SubquadModel], ...] = (
    SubquadForCausalLM,
    SubquadForSeq2SeqLM,
    SubquadForImageClassification,
    SubquadForSequenceClassification,
    SubquadForMaskedLM,
)


def save_huggingface(run: LoadedRun, out: Path) -> None:
    """Writes a folder that `from_pretrained` and `pipeline` can read."""
    save = {
        SubquadForSeq2SeqLM: _save_translator,
        SubquadForCausalLM: _save_language_model,
        SubquadForImageClassification: _save_image_classifier,
        SubquadForSequenceClassification: _save_text_classifier,
        SubquadForMaskedLM: _save_masked_language_model,
    }[_wrapper_class(run.model)]
    with new_folder(out) as folder:
        wrapped = save(run, folder)
        wrapped.config.aux_weight = run.recipe.train.aux_weight
        (folder / CARD).write_text(model_card(run.model, wrapped.usage, run, library="transformers"), encoding="utf-8")
        wrapped.save_pretrained(folder)
        # with these `subquad import` makes a run of the folder again
        copy_inputs(run.folder, folder)
        recipe = shorten_paths(run.recipe.model_dump(mode="json", exclude={"track"}))
        (folder / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


def wrap(model: Model, **config: Any) -> SubquadModel:
    """Returns a copy of a model in the format of Hugging Face, in eval mode. config: see SubquadConfig."""
    wrapped = _wrapper_class(model)(SubquadConfig(subquad=model.config.model_dump(mode="json"), **config))
    wrapped.model.load_state_dict(model.state_dict())
    if isinstance(wrapped, SubquadGenerator):
        special = {name: number for name, number in config.items() if name.endswith("_token_id")}
        padding = [config["pad_token_id"]] if "pad_token_id" in config else None
        wrapped.generation_config = GenerationConfig(**special, suppress_tokens=padding)  # padding is never generated
    return wrapped.eval()


def _wrapper_class(model: Model) -> type[SubquadModel]:
    """The class for a model's kind."""
    for one in WRAPPERS:
        if model.config.kind in one.kinds:
            return one
    raise AssertionError(f"no class holds models of kind {model.config.kind}")


# ---------------------------------------------------------------------- tasks


def _save_image_classifier(run: LoadedRun, out: Path) -> SubquadModel:
    SubquadImageProcessor(run.inputs["transform"]).save_pretrained(out)
    return wrap(run.model, **_class_names(run))


def _save_text_classifier(run: LoadedRun, out: Path) -> SubquadModel:
    """Saves a classifier whose tokenizer cuts texts, when it is asked to, to what the model gets here."""
    words = run.tokenizer("text")
    wrapped = wrap(run.model, pad_token_id=words.pad, eos_token_id=words.eos, **_class_names(run))
    assert isinstance(run.model, TextClassifier)
    assert isinstance(run.data, TextClassificationData)
    most = max_tokens(run.model, run.data)
    convert_tokenizer(words, "before", None if most is None else most + WITH_EOS).save_pretrained(out)
    return wrapped


def _class_names(run: LoadedRun) -> dict[str, Any]:
    labels = dict(enumerate(run.inputs["classes"]))
    return {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}


def _save_language_model(run: LoadedRun, out: Path) -> SubquadModel:
    words = run.tokenizer("text")
    wrapped = wrap(run.model, pad_token_id=words.pad, eos_token_id=words.eos, bos_token_id=words.eos)
    assert isinstance(wrapped, SubquadForCausalLM)
    convert_tokenizer(words, "before", max_text_length(wrapped.model)).save_pretrained(out)
    return wrapped


def _save_masked_language_model(run: LoadedRun, out: Path) -> SubquadModel:
    words = run.tokenizer("text")
    special = {"pad_token_id": words.pad, "bos_token_id": beginning(words), "eos_token_id": words.eos}
    wrapped = wrap(run.model, **special)
    assert isinstance(wrapped, SubquadForMaskedLM)
    tokenizer = convert_tokenizer(words, "around", max_text_length(wrapped.model))
    assert tokenizer.mask_token_id == wrapped.model.config.mask
    tokenizer.save_pretrained(out)
    return wrapped


def _save_translator(run: LoadedRun, out: Path) -> SubquadModel:
    """Saves a translator with the search options of the recipe that transformers knows."""
    source, target = run.tokenizer("source"), run.tokenizer("target")
    wrapped = wrap(run.model, pad_token_id=target.pad, eos_token_id=target.eos, decoder_start_token_id=target.eos)
    assert isinstance(wrapped, SubquadForSeq2SeqLM)
    longest = max_text_length(wrapped.model)
    convert_tokenizer(source, "after", max_source_length(wrapped.model)).save_pretrained(out)
    convert_tokenizer(target, "after", longest).save_pretrained(out / TARGET)
    options = run.recipe.decode
    # in transformers the end is one of the new tokens
    limit = int(options.max_len_a * LONG_SOURCE + options.max_len_b) + 1
    wrapped.generation_config.update(
        num_beams=options.beam,
        length_penalty=options.lenpen,
        early_stopping=options.beam > 1,
        min_new_tokens=options.min_len,
        max_new_tokens=limit if longest is None else min(limit, longest),
        no_repeat_ngram_size=options.no_repeat_ngram,
        forced_eos_token_id=target.eos,  # a translation that reaches the limit ends there
    )
    return wrapped
