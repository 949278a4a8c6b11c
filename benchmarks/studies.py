"""The efficiency studies of the original programs, as data: models, lengths, and what differs from the original.

Models are those of the recipes and presets; `sizes` makes them small enough for a few CPU cores. What it leaves alone
is what the ratios depend on: the heads' width, the options of the mechanisms, and how many layers have which mechanism.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from subquad.compare.measure.lengths import Part
from subquad.compare.plan import Plan
from subquad.compare.variants import Variant
from subquad.config import merge_options
from subquad.nn.stack import MixerChoice
from subquad.train.recipe import Recipe, read_recipe

Data = dict[str, Any]


class Source(NamedTuple):
    """The name of a recipe, and what is changed in its model."""

    recipe: str
    changes: Data


@dataclass(frozen=True)
class Study:
    """What the numbers of one table depend on, besides the machine."""

    title: str
    original: str
    """What the original program measures, and on what."""
    scaled: str
    """In what the models here differ from it."""
    models: dict[str, Source]
    """By label; the first one is the baseline."""
    mixing: str
    """The stack in which the models differ."""
    parts: tuple[Part, ...]
    lengths: tuple[int, ...]
    """Ascending; the longest one that is measured is also the number of tokens of a batch at all lengths."""
    sizes: Data
    """Put over all models."""
    toy_sizes: Data
    """Put over those as well, to see that everything works."""
    toy_lengths: tuple[int, ...] = (16, 64)

    @property
    def baseline(self) -> str:
        return next(iter(self.models))

    def plan(self, repeats: int, longest: int, quick: bool) -> Plan:
        """quick: toy sizes, whose times mean nothing."""
        lengths = self.toy_lengths if quick else tuple(length for length in self.lengths if length <= longest)
        sizes = merge_options(self.sizes, self.toy_sizes) if quick else self.sizes
        recipes = {label: _sized(source, sizes) for label, source in self.models.items()}
        return Plan(
            recipe=recipes[self.baseline].model_dump(mode="json"),
            data_dependent_model_config={},
            variants=tuple(self._variant(label, recipe) for label, recipe in recipes.items()),
            seeds=(0,),
            split="test",
            lengths=lengths,
            tokens=max(lengths),
            looks=(repeats,),
        )

    def _variant(self, label: str, recipe: Recipe) -> Variant:
        choice = MixerChoice.model_validate(recipe.model_data({})[self.mixing]["mixer"])
        return Variant(label=label, mixer=choice.name, options=choice.options, model=recipe.model)


def _sized(source: Source, sizes: Data) -> Recipe:
    recipe = read_recipe(source.recipe)
    model = merge_options(merge_options(recipe.model, source.changes), sizes)
    return Recipe.parse(source.recipe, {**recipe.model_dump(mode="json"), "model": model})


POWERS = (256, 512, 1024, 2048, 4096, 8192, 16384)
HALF_WIDTH = {"heads": 4, "ffn_dim": 1024}
TOY = {"layers": 1, "heads": 2, "ffn_dim": 32}


def _stacks(*names: str, **options: Any) -> Data:
    return dict.fromkeys(names, options)


LINFORMER = Study(
    title="Linformer against the transformer that it replaces",
    original="crybot/linformer, `src/compare_performance.py` with the `perf_*` configs: inference of a translation "
    "model of 6 + 6 layers, width 512 and 50,272 words, with k = 32, 64 and 128, the whole model and its encoder "
    "alone, 16,384 tokens at every length from 256 to 16,384. (Its configs called k32 say k = 64; here k is 32.)",
    scaled="1 + 1 layers of half the width (heads as wide as there) and a twelfth of the words, which leaves layers "
    "and vocabulary their shares of the work. At half the width a token's linear maps cost a quarter and attention "
    "half: a length here is like twice that length there. float32 instead of float16, training as well as inference.",
    models={
        "vanilla": Source("wmt14_linformer_vanilla", {}),
        **{
            f"k = {k}": Source("wmt14_linformer_vanilla", {"preset": f"linformer_translation_k{k}"})
            for k in (32, 64, 128)
        },
    },
    mixing="encoder",
    parts=("encoder", "full"),
    lengths=POWERS,
    sizes={
        "dim": 256,
        "source_vocab": 4192,
        "target_vocab": 4192,
        **_stacks("encoder", "decoder", layers=1, **HALF_WIDTH),
    },
    toy_sizes={"dim": 16, "source_vocab": 24, "target_vocab": 24, **_stacks("encoder", "decoder", **TOY)},
)

PRIMAL = Study(
    title="A language model with one layer of primal attention",
    original="PrimalAttention_NLP, `fairseq_cli/train_efficiency.py`: time and memory of one epoch of WikiText-103, "
    "for five layers of softmax attention and one of primal attention of rank 30, width 512, 267,744 words, 2,048 "
    "tokens in blocks of 512.",
    scaled="all six layers at half the width, heads as wide as there, and 8,192 words: with all words nine tenths of "
    "the work would be the vocabulary's, which both models share. Passes over one batch instead of an epoch, at "
    "several lengths of a block, against six layers of softmax attention.",
    models={
        "6 softmax": Source(
            "wikitext103_primal", {"preset": "transformer_lm", "decoder": {"mixer": {"name": "softmax"}}}
        ),
        "5 softmax, 1 primal": Source("wikitext103_primal", {}),
    },
    mixing="decoder",
    parts=("full",),
    lengths=(512, 2048, 4096, 8192, 16384),
    sizes={"dim": 256, "vocab": 8192, "decoder": HALF_WIDTH},
    toy_sizes={"dim": 16, "vocab": 24, "decoder": {**TOY, "layers": 6}},
)

ATTENTION = Study(
    title="EVA, LARA, performer and local attention by length",
    original="efficient-attention, `main.sh -m evit_tiny_p8` with `--attn-name` softmax, performer, local, lara and "
    "eva: image classification with DeiT-tiny (12 layers, width 192) and the options that its README gives each "
    "mechanism. 196 and 784 are its numbers of patches, 3,136 is that of the first stage of its pyramid.",
    scaled="4 layers instead of 12, which are all alike; nothing else. Larger images have more patches of the same "
    "8 x 8 pixels, and as many fewer of them are in a batch.",
    models={
        name: Source(f"imagenet_evit_tiny_p8_{name}", {}) for name in ("softmax", "performer", "local", "lara", "eva")
    },
    mixing="encoder",
    parts=("full",),
    lengths=(196, 784, 3136, 12544),
    sizes={"encoder": {"layers": 4}},
    toy_sizes={"dim": 16, "num_classes": 5, "encoder": TOY},
)


def _convolution(name: str, **options: Any) -> Source:
    """In both stacks, so that the recipe's lists of a kernel for each layer are gone."""
    return Source("iwslt14_de_en_lightconv", _stacks("encoder", "decoder", mixer={"name": name, **options}))


CONVOLUTION = Study(
    title="Lightweight and dynamic convolutions by kernel size",
    original="fairseq, `examples/pay_less_attention_paper`: `lightconv_iwslt_de_en` without GLU (7 + 6 layers, width "
    "512, kernels of 3, 7, 15 and 31), with kernels that its README says save half of the memory at long lengths.",
    scaled="one layer of the encoder, with the same kernel size in all of it; nothing else. The operation alone, "
    "against the formulations that those kernels replaced, is measured in [Speed and memory](performance.md).",
    models={
        "softmax": _convolution("softmax", attention_dropout=0.1),
        **{
            f"{name}, K = {size}": _convolution(name, kernel_size=size, glu=False, tap_dropout=0.1)
            for name in ("lightconv", "dynamicconv")
            for size in (3, 7, 15, 31)
        },
    },
    mixing="encoder",
    parts=("encoder",),
    lengths=(256, 1024, 4096, 16384),
    sizes=_stacks("encoder", "decoder", layers=1),
    toy_sizes={"dim": 16, "source_vocab": 24, "target_vocab": 24, **_stacks("encoder", "decoder", **TOY)},
)

STUDIES = {"linformer": LINFORMER, "primal": PRIMAL, "attention": ATTENTION, "convolution": CONVOLUTION}
