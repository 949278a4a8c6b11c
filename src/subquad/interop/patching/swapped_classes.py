"""Classes of transformers for swapped models, through which its own `from_pretrained` loads them.

    subquad.swap(model, "eva", window=64)
    model.save_pretrained("llama-eva")
    AutoModelForCausalLM.from_pretrained("llama-eva")                          # after importing this module
    AutoModelForCausalLM.from_pretrained("llama-eva", trust_remote_code=True)  # without: see interop/remote_code.py

In memory a swapped model keeps its class, and the class of its config has the same name and `model_type` as before. In
files the model is of another type, `subquad_swapped`: a program that does not know what was swapped would otherwise
load it with the attention of before, and find nothing missing. From such a config the Auto classes build the model with
its mixers, before weights are loaded, so that weights, precision, devices and shards are transformers' own affair.
"""

from functools import cache
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from subquad.interop.constants import restore_constants
from subquad.interop.patching.host import ATTENTION_NAME, SwappedAttention
from subquad.interop.patching.swap import swap
from subquad.interop.remote_code import STUB, InstalledClass, write_stub

SWAPS = "subquad_swap"
"""The attribute of configs with the list of swaps."""
HOST_TYPE = "swapped_model_type"
"""In files, the `model_type` of before the swap."""


class SwappedConfig(InstalledClass, PreTrainedConfig):
    """Reads the config of any swapped model; AutoConfig finds it by the type of the model."""

    model_type = "subquad_swapped"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Returns a config of the class that `swapped_config_class` derives from the one of before the swap."""
        host_type = str(config_dict.get(HOST_TYPE))
        if host_type not in CONFIG_MAPPING:
            raise ValueError(f"a swapped model of type {host_type!r}, which this version of transformers does not know")
        given = {name: value for name, value in config_dict.items() if name not in _file_entries(host_type)}
        host: Any = CONFIG_MAPPING[host_type]
        return swapped_config_class(host).from_dict(given, **options)


def _file_entries(host_type: str) -> dict[str, Any]:
    """What the config of a swapped model says in files beside what it says in memory.

    The attention is one that only swapped layers have: where a class of transformers reads the file in spite of the
    type, it refuses it.
    """
    return {
        "model_type": SwappedConfig.model_type,
        HOST_TYPE: host_type,
        "attn_implementation": ATTENTION_NAME,
        "auto_map": {"AutoConfig": f"{STUB}.{SwappedConfig.__name__}"},
    }


class _SwappedConfigFile:
    """How the config of a swapped model is written: the first base of its class, before the one of `host`."""

    host: ClassVar[Any]

    def to_diff_dict(self) -> dict[str, Any]:
        return self.host.to_diff_dict(self) | _file_entries(self.host.model_type)

    def save_pretrained(self, save_directory: Any, *inputs: Any, **options: Any) -> None:
        self.host.save_pretrained(self, save_directory, *inputs, **options)
        write_stub(save_directory)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restore_config, (self.host, self.__dict__)  # pickle finds no class that is made while a program runs


def _restore_config(host: Any, attributes: dict[str, Any]) -> Any:
    kind = swapped_config_class(host)
    config = kind.__new__(kind)
    config.__dict__.update(attributes)
    return config


@cache
def swapped_config_class(host: Any) -> Any:
    """The class of configs of models with configs of the class `host` whose attention was swapped.

    Every Auto class that builds models for `host` builds swapped ones for this class.
    """
    own = {"host": host, "__init__": host.__init__, "__module__": host.__module__}
    kind = type(host.__name__, (_SwappedConfigFile, host), own)
    for auto in vars(modeling_auto).values():
        if not (isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass)):
            continue
        known: Any = auto._model_mapping
        if known is not None and host in known:
            models = known[host] if isinstance(known[host], tuple) else (known[host],)
            known.register(kind, tuple(swapped_model_class(model) for model in models), exist_ok=True)
    return kind


class _SwappedModel:
    """Builds a model of the class `host`, whose attention is swapped as its config says."""

    host: ClassVar[Any]

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        swaps = getattr(config, SWAPS)
        setattr(config, SWAPS, [])  # each swap adds itself, and models that this one is made of swap nothing
        self.host.__init__(self, config, *inputs, **options)
        self.__class__ = self.host  # as a model that is swapped after it was built
        for found in swaps:
            report = swap(self, found["mixer"], layers=found["layers"], **found["options"])  # type: ignore[arg-type]
            if [layer.number for layer in report.replaced] != found["layers"]:
                raise ValueError("this model was swapped as a part of a larger one, which has other layer numbers")

    @classmethod
    def from_pretrained(cls, name: Any, *inputs: Any, **options: Any) -> Any:
        """Loads a model as transformers does, restores the constants of mixers, and refuses missing weights of them."""
        with_info = options.pop("output_loading_info", False)
        parent: Any = super()
        found = parent.from_pretrained(name, *inputs, output_loading_info=True, **options)
        model, info = found
        mixers = tuple(f"{path}." for path, part in model.named_modules() if isinstance(part, SwappedAttention))
        if missing := sorted(key for key in info["missing_keys"] if key.startswith(mixers)):
            raise ValueError(f"{name} has no weights for {', '.join(missing[:10])}")
        restore_constants(model)
        return found if with_info else model


@cache
def swapped_model_class(host: type[PreTrainedModel]) -> Any:
    """The class that builds swapped models of the class `host`."""
    return type(host.__name__, (_SwappedModel, host), {"host": host, "__module__": host.__module__})


AutoConfig.register(SwappedConfig.model_type, SwappedConfig)
