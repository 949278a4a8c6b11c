"""How fast trained models write: tokens a second, all mechanisms side by side on the same inputs.

Translation: the first lines of the split, with the recipe's beam. Language models: greedy continuations of its first
lines. Images are not decoded.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from subquad.compare.measure.timing import interleaved_seconds, synchronizer
from subquad.decode.generate import Generator
from subquad.decode.options import SampleOptions
from subquad.decode.translate import Translator
from subquad.models import LanguageModel, Seq2Seq
from subquad.train.evaluation import text_of
from subquad.train.loaded import Loaded, load_run

LINES = 32
PROMPTS, PROMPT_WORDS, NEW_TOKENS = 8, 8, 64


class Speed(NamedTuple):
    """tokens_per_second: None where the mechanism cannot decode, for a reason."""

    tokens_per_second: float | None
    reason: str | None = None


def measure_decoding(
    runs: Mapping[str, Path], split: str, repeats: int, begin: Callable[[str], None]
) -> dict[str, Speed]:
    """By label. begin: told before each mechanism is tried."""
    found: dict[str, Speed] = {}
    tokens: dict[str, int] = {}
    work: dict[str, Callable[[], object]] = {}
    device = None
    for label, folder in runs.items():
        begin(label)
        loaded = load_run(folder)
        device = loaded.device
        write = _writer(loaded, split)
        try:
            tokens[label] = write()
        except ValueError as refusal:  # a mechanism without a streaming form
            found[label] = Speed(None, str(refusal))
        else:
            work[label] = write
    begin("all, side by side")
    if device is not None:
        seconds = interleaved_seconds(work, repeats, synchronize=synchronizer(device))
        for label, times in seconds.items():
            found[label] = Speed(tokens[label] / sorted(times)[len(times) // 2])
    return found


def _writer(loaded: Loaded, split: str) -> Callable[[], int]:
    """A function that decodes, and returns how many tokens it wrote, the ends of texts included."""
    model = loaded.model
    lines = [sample[0] for sample in text_of(loaded, split, LINES)[0]]  # of translation the sources
    if isinstance(model, Seq2Seq):
        translator = Translator([model], loaded.tokenizer("source"), loaded.tokenizer("target"), loaded.recipe.decode)
        return lambda: sum(len(result.candidates[0].log_probabilities) for result in translator.window(lines))
    assert isinstance(model, LanguageModel)
    generator = Generator([model], loaded.tokenizer("text"), loaded.recipe.decode)
    prompts = [" ".join(line.split()[:PROMPT_WORDS]) for line in lines if line.strip()][:PROMPTS] or ["."]
    new = NEW_TOKENS if generator.most is None else max(1, min(NEW_TOKENS, generator.most // 2))
    greedy = SampleOptions(temperature=0)
    return lambda: sum(len(text.log_probabilities) for text in generator.sample(prompts, new, greedy))
