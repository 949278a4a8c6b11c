"""The model of a fairseq-train command: the defaults of its architecture, then its flags.

An architecture is a preset. The flags change a copy of it, and the section `model` of the recipe is the preset and what
differs from it.
"""

import ast
import copy
from collections.abc import Callable, Mapping
from typing import Any

from subquad.config import nearest
from subquad.interop.commands.flags import Arguments
from subquad.models import PRESETS
from subquad.original_names import MODEL, key

ARCHITECTURES = {
    "lightconv": "lightconv_wmt_en_de",
    "transformer": "transformer_wmt_en_de",
    "transformer_lm_baevski_wiki103": "transformer_lm_wiki103",
}
"""Architectures whose preset has another name."""
OWN_WEIGHT_DROPOUT = ("lightconv_iwslt_de_en", "lightconv_wmt_zh_en_big")
"""Architectures with a default of their own for --weight-dropout; in the others it follows --attention-dropout."""
ALWAYS_PRE_NORM = ("language-model",)
CONVOLUTIONS = {"lightweight": "lightconv", "dynamic": "dynamicconv"}
MECHANISMS = ("mixer", "cross")

Data = dict[str, Any]
Convert = Callable[[str], Any]


class ModelFlags:
    """Applies the flags of a command to the preset of its architecture, and remembers which flag set what."""

    def __init__(self, architecture: str, arguments: Arguments) -> None:
        name = ARCHITECTURES.get(architecture, architecture)
        if name not in PRESETS:
            known = sorted({*PRESETS, *ARCHITECTURES})
            raise ValueError(
                f"fairseq-train: no preset has the architecture {architecture!r}{nearest(architecture, known)} Known "
                f"ones: {', '.join(known)}."
            )
        self.preset, self.arguments = name, arguments
        self.model: Data = copy.deepcopy(PRESETS[name])
        self.origins: dict[str, str] = {"model.preset": arguments.words("arch") or ""}
        self.sides = [side for side in ("encoder", "decoder") if side in self.model]
        for side in self.sides:
            for part in MECHANISMS:
                if isinstance(self.model[side].get(part), str):
                    self.model[side][part] = {"name": self.model[side][part]}
        self.embeddings = {"source": "encoder", "target": "decoder"} if len(self.sides) == 2 else {"embedding": ""}
        self.asked = {"arch"}

    def section(self) -> Data:
        """The section `model` of the recipe."""
        self._stacks()
        self._dropout()
        self._convolutions()
        self._linformer()
        self._embeddings()
        return {"preset": self.preset, **_difference(PRESETS[self.preset], self.model)}

    def without_lines(self, section: Data) -> list[str]:
        """The words of the command that the preset fulfils already, so that no line of the section shows them."""
        shown = {words for path, words in self.origins.items() if has_field({"model": section}, path)}
        return [words for words in dict.fromkeys(self.origins.values()) if words not in shown]

    def without_effect(self) -> dict[str, str]:
        """The words that change a part which the architecture does not have, and why they have no counterpart."""
        known = {key(name): flag for name, flag in MODEL.items() if not flag.reason}
        given = self.arguments.values.items()
        reason = f"{self.preset} has no part that it changes"
        return {one.words: reason for name, one in given if name in known and name not in self.asked}

    # ------------------------------------------------------------------ groups of flags

    def _stacks(self) -> None:
        for side in self.sides:
            self._set(f"{side}_embed_dim", "dim", int)
            self._set(f"{side}_layers", f"{side}.layers", int)
            self._set(f"{side}_ffn_embed_dim", f"{side}.ffn_dim", int)
            self._set(f"{side}_attention_heads", f"{side}.heads", int)
            self._set(f"{side}_layerdrop", f"{side}.layer_drop", float)
            self._set("activation_fn", f"{side}.activation", str)
            if self.model["kind"] not in ALWAYS_PRE_NORM:
                self._set(f"{side}_normalize_before", f"{side}.norm", lambda _: "pre")

    def _dropout(self) -> None:
        for owner in (*self.sides, *self.embeddings):
            self._set("dropout", f"{owner}.dropout", float)
        for side in self.sides:
            self._set("relu_dropout", f"{side}.activation_dropout", float)
            self._set("activation_dropout", f"{side}.activation_dropout", float)
            for part in MECHANISMS:
                if self.model[side].get(part, {}).get("name", "") in ("softmax", "linformer"):
                    self._set("attention_dropout", f"{side}.{part}.attention_dropout", float)
            if self._is_convolution(side):
                self._set("input_dropout", f"{side}.input_dropout", float)
                if self.preset not in OWN_WEIGHT_DROPOUT:
                    self._set("attention_dropout", f"{side}.mixer.tap_dropout", float)
                self._set("weight_dropout", f"{side}.mixer.tap_dropout", float)

    def _convolutions(self) -> None:
        for side in filter(self._is_convolution, self.sides):
            self._set(f"{side}_conv_type", f"{side}.mixer.name", _convolution)
            self._set(f"{side}_kernel_size_list", f"{side}.mixer.kernel_size", parse_list)
            self._set(f"{side}_glu", f"{side}.mixer.glu", parse_bool)

    def _linformer(self) -> None:
        mixer = self.model.get("encoder", {}).get("mixer", {})
        if mixer.get("name") != "linformer":
            return
        length = int(self.arguments.get("tokens_per_sample", mixer["max_length"]))
        if length != mixer["max_length"]:
            self._set("tokens_per_sample", "encoder.mixer.max_length", int)
            self._set("tokens_per_sample", "embedding.max_length", int)
            mixer["proj_k"] = length // 4
        self._set("compressed", "encoder.mixer.proj_k", lambda ratio: length // int(ratio))
        for flag in ("shared_kv_compressed", "shared_layer_kv_compressed"):
            self._set(flag, "encoder.mixer.share_kv", parse_bool, only_if_true=True)
        self._set("shared_layer_kv_compressed", "encoder.mixer.share_layers", parse_bool, only_if_true=True)
        self._set("freeze_compress", "encoder.mixer.frozen", parse_bool, only_if_true=True)

    def _embeddings(self) -> None:
        for name, side in self.embeddings.items():
            self._set(f"{side or self.sides[0]}_learned_pos", f"{name}.positions", lambda _: "learned")
            self._set("no_token_positional_embeddings", f"{name}.positions", lambda _: "none")
            self._set("no_scale_embedding", f"{name}.scale", lambda _: False)
            self._set("layernorm_embedding", f"{name}.norm", lambda _: True)
        words = self.arguments.words("share_all_embeddings") or self.arguments.words("share_decoder_input_output_embed")
        self.asked |= {"share_all_embeddings", "share_decoder_input_output_embed"}
        if words:
            self.origins |= {"model.head.tied": words, "model.shared_embedding": words}
        if self.model["kind"] == "masked-language-model" or "cutoffs" in self.model.get("head", {}):
            return  # their output is the embedding's, whatever the flags say
        shared = "share_all_embeddings" in self.arguments
        self.model.setdefault("head", {})["tied"] = words is not None
        if len(self.sides) == 2:
            self.model["shared_embedding"] = shared

    # ------------------------------------------------------------------ one flag

    def _set(self, flag: str, path: str, convert: Convert, only_if_true: bool = False) -> None:
        """Sets what a flag sets, if the command has it."""
        self.asked.add(flag)
        if flag not in self.arguments:
            return
        given = self.arguments.values[flag]
        try:
            value = convert(given.value)
        except (ValueError, TypeError, SyntaxError) as error:
            raise ValueError(f"fairseq-train: {given.words}: {error}") from None
        if only_if_true and not value:
            return
        *owners, name = path.split(".")
        part = self.model
        for owner in owners:
            part = part.setdefault(owner, {})
        part[name] = value
        self.origins[f"model.{path}"] = given.words

    def _is_convolution(self, side: str) -> bool:
        return self.model[side]["mixer"]["name"] in CONVOLUTIONS.values()


def _convolution(kind: str) -> str:
    if kind not in CONVOLUTIONS:
        raise ValueError(f"a convolution is {' or '.join(CONVOLUTIONS)}")
    return CONVOLUTIONS[kind]


def parse_bool(text: str) -> bool:
    """Reads a truth value as fairseq does: 0, 1, True, False."""
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError("a truth value is 0, 1, True or False")
    return text.lower() in ("1", "true")


def parse_list(text: str) -> list[int]:
    """Reads [3,7,15] or 3,7,15; products such as [3]*4 are those of Python."""
    head, star, count = text.replace(" ", "").partition("*")
    values = ast.literal_eval(head if head.startswith(("[", "(")) else f"[{head}]")
    return [int(value) for value in values] * (int(count) if star else 1)


def has_field(content: Mapping[str, Any], path: str) -> bool:
    """Whether a recipe has a field, by its dotted name."""
    part: Any = content
    for name in path.split("."):
        if not isinstance(part, Mapping) or name not in part:
            return False
        part = part[name]
    return True


def _difference(base: Mapping[str, Any], changed: Mapping[str, Any]) -> Data:
    """What has to be merged into `base` to get `changed`. A mechanism that differs is given as a whole."""
    found = {}
    for name, value in changed.items():
        old = base.get(name)
        old = {"name": old} if name in MECHANISMS and isinstance(old, str) else old
        if isinstance(value, Mapping) and isinstance(old, Mapping) and name not in MECHANISMS:
            if more := _difference(old, value):
                found[name] = more
        elif value != old:
            found[name] = value
    return found
