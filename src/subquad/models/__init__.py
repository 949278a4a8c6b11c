"""The models. Each is built from one config: `build_model("transformer_iwslt_de_en", source_vocab=..., ...)`."""

from subquad.models.base import MODELS, Model, ModelConfig, ModelOutput, build_from_config
from subquad.models.classifier import TextClassifier, TextClassifierConfig
from subquad.models.language import LanguageModel, LanguageModelConfig
from subquad.models.masked import MaskedLanguageModel, MaskedLanguageModelConfig
from subquad.models.presets import PRESETS, build_model, preset
from subquad.models.pyramid import Pyramid, PyramidConfig
from subquad.models.seq2seq import Seq2Seq, Seq2SeqConfig
from subquad.models.storage import load_model, save_model
from subquad.models.vision import VisionConfig, VisionTransformer

__all__ = [
    "MODELS",
    "PRESETS",
    "LanguageModel",
    "LanguageModelConfig",
    "MaskedLanguageModel",
    "MaskedLanguageModelConfig",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "Pyramid",
    "PyramidConfig",
    "Seq2Seq",
    "Seq2SeqConfig",
    "TextClassifier",
    "TextClassifierConfig",
    "VisionConfig",
    "VisionTransformer",
    "build_from_config",
    "build_model",
    "load_model",
    "preset",
    "save_model",
]
