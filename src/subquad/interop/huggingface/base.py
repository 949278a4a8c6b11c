"""The base class of our models in the format of Hugging Face. Each holds one of our models as its attribute `model`.

Only documented parts of transformers are used: the methods that users call (`generate`, `from_pretrained`, ...), the
attributes that its documentation names, and `_init_weights`, which every model must define.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from subquad.interop.constants import restore_constants
from subquad.interop.export.card import CARD, model_card
from subquad.interop.huggingface.config import SubquadConfig
from subquad.interop.remote_code import InstalledClass, write_stub
from subquad.models import Model, build_from_config
from subquad.nn.stack import Stack
from subquad.packages import require
from subquad.tasks.losses import LossOutput, class_loss

IGNORED = -100
"""The label of positions without a target, as in all of transformers."""
SAVED_AGAIN = "\n*The model was loaded and saved again. This card was written before that.*\n"
"""The last line of a card that was loaded with weights, which may have been trained since then."""
AnyOutput = TypeVar("AnyOutput", bound=ModelOutput)


class SubquadModel(InstalledClass, PreTrainedModel):
    """The base class of all models."""

    config_class = SubquadConfig
    config: SubquadConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch, so accumulated batches have one mean loss
    kinds: ClassVar[tuple[str, ...]]
    """The kinds of our models that the class can hold."""
    usage: ClassVar[str]
    """A program that uses the model, for the model card."""
    card: str | None = None
    """The card of the folder or repository that the model was loaded from, which has recipe, data and metrics."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        kind = config.subquad.get("kind")
        if kind not in self.kinds:
            raise ValueError(f"{type(self).__name__} holds models of kind {' or '.join(self.kinds)}, not {kind}")
        if config.tie_word_embeddings != config.ties_head:
            raise ValueError(
                f"tie_word_embeddings cannot become {config.tie_word_embeddings}: model.head.tied and "
                "model.shared_embedding decided it before training"
            )
        if "num_classes" in config.subquad:  # another number may have been given as num_labels or id2label
            config.subquad = {**config.subquad, "num_classes": config.num_labels}
        self.model: Model = build_from_config(config.subquad)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, because our models initialise their weights themselves."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        """Loads a model as the base class does, but restores the constants of mixers and refuses missing weights.

        With ignore_mismatched_sizes, weights of another size are new, as in a model that is trained from the start.
        Only safetensors are read: the base class would take a pickle (pytorch_model.bin) if there is nothing else.
        """
        if options.get("use_safetensors") is False:
            raise ValueError("models of subquad are safetensors; use_safetensors=False would read a pickle")
        options["use_safetensors"] = True
        with_info = options.pop("output_loading_info", False)
        options["output_loading_info"] = True
        found: Any = super().from_pretrained(pretrained_model_name_or_path, *inputs, **options)
        model, info = found
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"{pretrained_model_name_or_path} has no weights for {', '.join(missing[:10])}")
        restore_constants(model)
        restore_mismatched(model, {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]})
        if pretrained_model_name_or_path is not None:
            model.card = load_card(str(pretrained_model_name_or_path), options)
        return found if with_info else model

    def save_pretrained(self, save_directory: Any, *inputs: Any, **options: Any) -> Any:
        """Saves the model as the base class does, with what lets transformers find our classes, and adds a model card
        unless the folder has one."""
        if options.get("push_to_hub"):
            raise ValueError("save_pretrained cannot push the model's own card; call push_to_hub(NAME) instead")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CARD).exists():
            if self.card is not None:
                text = self.card.removesuffix(SAVED_AGAIN) + SAVED_AGAIN
            else:
                text = model_card(self.model, self.usage, library="transformers")
            (folder / CARD).write_text(text, encoding="utf-8")
        write_stub(folder)
        return super().save_pretrained(save_directory, *inputs, **options)

    def push_to_hub(  # type: ignore[override]  # it names its options, but the base class accepts any
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: bool | str | None = None,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
        **commit: Any,
    ) -> Any:
        """Uploads the model with its card. The method of the base class would upload an empty card.

        A card that is already in the repository is kept. commit: commit_message, commit_description, revision,
        create_pr.
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
        """Whether blocks keep only their inputs for the backward pass; `gradient_checkpointing_enable` sets it."""
        return any(stack.recompute for stack in self._stacks())

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        for stack in self._stacks():
            stack.recompute = enabled

    def _stacks(self) -> list[Stack]:
        return [module for module in self.modules() if isinstance(module, Stack)]

    def mean_loss(self, loss: LossOutput, aux: Tensor | None, items: Tensor | int | None) -> Tensor:
        """Returns the mean loss of targets. items: the targets of all batches of an update, if there are several."""
        total = loss.total
        if aux is not None and self.config.aux_weight:
            total = total + self.config.aux_weight * loss.count * aux.float().mean()
        return total / (items if items is not None else max(1, loss.count))

    def class_loss(
        self, logits: Tensor, labels: Tensor | None, aux: Tensor | None, items: Tensor | int | None
    ) -> Tensor | None:
        """Returns the mean loss of classes. labels: (batch,) class numbers, or (batch, classes) probabilities."""
        if labels is None:
            return None
        if self.config.problem_type not in (None, "single_label_classification"):
            raise ValueError(f"the loss of problem_type={self.config.problem_type!r} is not that of classes here")
        return self.mean_loss(class_loss(logits, labels), aux, items)

    def records_hidden_states(self, asked: bool | None) -> bool:
        """Whether an output has hidden states. asked: what the caller says of it, where the config is the default."""
        return bool(self.config.output_hidden_states if asked is None else asked)

    def build_output(
        self, kind: type[AnyOutput], return_dict: bool | None, **values: Any
    ) -> AnyOutput | tuple[Any, ...]:
        """Returns an output object of transformers, or its values as a tuple if return_dict is False."""
        output = kind(**values)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


def load_card(name: str, options: Mapping[str, Any]) -> str | None:
    """Returns the card of a model's folder or hub repository, or None if there is none or it cannot be reached.

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


def restore_mismatched(model: SubquadModel, names: set[str]) -> None:
    """Gives weights of these names the values of a new model; loading leaves them undefined."""
    if names:
        fresh = build_from_config(model.config.subquad).state_dict()
        for name in names:
            model.get_parameter(name).data.copy_(fresh[name.removeprefix("model.")])
