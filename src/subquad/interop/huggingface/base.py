"""What the models in Hugging Face's format share. Each holds one of ours as `model`, and adds what transformers asks.

Only documented places of transformers are used: the methods that users call (`generate`, `from_pretrained`, ...), the
attributes that its documentation names, and `_init_weights`, which every model of its own has to give.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from subquad.interop.export.card import CARD, model_card
from subquad.interop.huggingface.cache import SubquadCache
from subquad.interop.huggingface.config import SubquadConfig
from subquad.mixers import Mixer
from subquad.models import Model, model_from
from subquad.nn.stack import Stack
from subquad.packages import require
from subquad.tasks.losses import LossOutput

IGNORED = -100
"""The label of positions without a target, as everywhere in transformers."""
SAVED_AGAIN = "\n*The model was loaded and saved again. What this card tells is from before that.*\n"
"""The last line of a card that came along with the weights, which may have been trained since."""
AnyOutput = TypeVar("AnyOutput", bound=ModelOutput)


class SubquadModel(PreTrainedModel):
    """Base of the three models."""

    config_class = SubquadConfig
    config: SubquadConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch: losses of accumulated batches are one mean
    kinds: ClassVar[tuple[str, ...]]
    """The kinds of our models that it can hold."""
    usage: ClassVar[str]
    """How it is loaded, for the model card."""
    card: str | None = None
    """Of the folder or repository that it was loaded from: it knows the recipe, data and metrics."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        kind = config.subquad.get("kind")
        if kind not in self.kinds:
            raise ValueError(f"{type(self).__name__} holds models of kind {' or '.join(self.kinds)}, not {kind}")
        self.model: Model = model_from(config.subquad)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Our models begin as they are built; transformers shall change nothing."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        """The base class's, which sets the constants of mixers aside and starts missing weights anew: we do not."""
        with_info = options.pop("output_loading_info", False)
        options["output_loading_info"] = True
        found: Any = super().from_pretrained(pretrained_model_name_or_path, *inputs, **options)
        model, info = found
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"{pretrained_model_name_or_path} lacks weights of the model: {', '.join(missing[:10])}")
        restore_constants(model)
        if pretrained_model_name_or_path is not None:
            model.card = card_beside(str(pretrained_model_name_or_path), options)
        return found if with_info else model

    def save_pretrained(self, save_directory: Any, *inputs: Any, **options: Any) -> Any:
        """The base class's, with a model card unless the folder has one."""
        if options.get("push_to_hub"):
            raise ValueError("save_pretrained cannot push with the model's own card: call push_to_hub(NAME) instead")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CARD).exists():
            if self.card is not None:
                text = self.card.removesuffix(SAVED_AGAIN) + SAVED_AGAIN
            else:
                text = model_card(self.model, self.usage, library="transformers")
            (folder / CARD).write_text(text, encoding="utf-8")
        return super().save_pretrained(save_directory, *inputs, **options)

    def push_to_hub(  # type: ignore[override]  # it names its options, the base class takes anything
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: bool | str | None = None,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
        **commit: Any,
    ) -> Any:
        """Does what the base class's does, which would put an empty form in the place of our card.

        A card that the repository has already stays. commit: commit_message, commit_description, revision, create_pr.
        """
        hub = require("huggingface_hub", "push_to_hub", "hf")
        name = hub.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        known = hub.file_exists(name, CARD, token=token)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            if tags:
                card = hub.ModelCard.load(Path(folder, CARD))
                card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), *tags]))
                card.save(Path(folder, CARD))
            commit = {"commit_message": f"Upload {type(self).__name__}"} | commit
            left = {"ignore_patterns": [CARD]} if known else {}
            return hub.upload_folder(repo_id=name, folder_path=folder, token=token, **left, **commit)

    @property
    def gradient_checkpointing(self) -> bool:
        """Blocks keep their inputs only; set by `gradient_checkpointing_enable`."""
        return any(stack.recompute for stack in self._stacks())

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        for stack in self._stacks():
            stack.recompute = enabled

    def _stacks(self) -> list[Stack]:
        return [module for module in self.modules() if isinstance(module, Stack)]

    def mean_loss(self, loss: LossOutput, aux: Tensor | None, items: Tensor | int | None) -> Tensor:
        """The mean over targets. items: targets of all batches of an update, where there are several."""
        total = loss.total
        if aux is not None and self.config.aux_weight:
            total = total + self.config.aux_weight * loss.count * aux.float().mean()
        return total / (items if items is not None else max(1, loss.count))


def card_beside(name: str, options: Mapping[str, Any]) -> str | None:
    """The card in the folder or, on the hub, the repository of a model; None where there is none, or no way to it.

    options: those of `from_pretrained`.
    """
    folder = options.get("subfolder") or ""
    path = Path(name, folder, CARD)
    if not Path(name).is_dir():
        hub = require("huggingface_hub", "a model of the hub", "hf")
        asked = {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in options}
        try:
            path = Path(hub.hf_hub_download(name, CARD, subfolder=folder or None, **asked))
        except (OSError, hub.errors.EntryNotFoundError):
            return None
    return path.read_text(encoding="utf-8") if path.is_file() else None


def restore_constants(model: nn.Module) -> None:
    """Gives mixers back what they compute from their options and do not store, which loading has left undefined."""
    for mixer in [module for module in model.modules() if isinstance(module, Mixer)]:
        stored = mixer.state_dict().keys()
        constants = {name: value for name, value in mixer.named_buffers() if name not in stored}
        if constants:
            with torch.random.fork_rng(devices=[]):  # a mixer draws weights, which are not wanted here
                fresh = dict(type(mixer)(mixer.config).named_buffers())
            for name, value in constants.items():
                value.copy_(fresh[name])


def padding_of(mask: Tensor | None, time: int) -> Tensor | None:
    """Our padding (batch, time) of the newest positions of a mask, which has 1 for tokens; None: all of them are."""
    if mask is None:
        return None
    padding = mask[:, -time:] == 0
    return padding if bool(padding.any()) else None


def started(cache: Any, use_cache: bool | None) -> SubquadCache | None:
    """The cache to read with; None: the whole sequence is given, and nothing is kept."""
    if cache is None:
        return SubquadCache() if use_cache else None
    if not isinstance(cache, SubquadCache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}; this model keeps its state in a SubquadCache")
    return cache


def as_asked(kind: type[AnyOutput], return_dict: bool | None, **values: Any) -> AnyOutput | tuple[Any, ...]:
    """An output of transformers, or its values as a tuple."""
    output = kind(**values)
    return output if return_dict is not False else output.to_tuple()
