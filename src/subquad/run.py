"""`Run`: a trained model as a program or a notebook uses it. `subquad.train` and `subquad.load_run` return one."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from subquad.data.tokenizers import Tokenizer
from subquad.decode.classify import ClassProbabilities, ImageClassifier, TextLabeller
from subquad.decode.generate import Generator
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.translate import Translator
from subquad.models import LanguageModel, Model, Seq2Seq
from subquad.tasks.classification import ClassificationTask
from subquad.train import checkpoint as stored
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import LoadedRun, find_checkpoint, load_trained
from subquad.train.run_folder import RECIPE
from subquad.train.trackers import local_run

if TYPE_CHECKING:
    from subquad.interop.checkpoints.fairseq.hub_interface import HubInterface


class Run:
    """A run directory, as `train` and `load_run` return it. Its model is loaded when it is first needed."""

    def __init__(self, folder: str | Path, checkpoint: str = "best", changes: Sequence[str] = ()) -> None:
        """See `load_run`."""
        self.folder = local_run(folder)
        self._checkpoint, self._changes = checkpoint, changes

    @cached_property
    def loaded(self) -> LoadedRun:
        """The run with the weights of its checkpoint."""
        return load_trained(self.folder, self._checkpoint, self._changes)

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def model(self) -> Model:
        """The model, in eval mode, on the GPU if there is one."""
        return self.loaded.model

    def tokenizer(self, side: str = "text") -> Tokenizer:
        """The tokenizer of a side: "source" and "target" in translation, otherwise "text"."""
        return self.loaded.tokenizer(side)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last validation; none if there was none yet."""
        saved = stored.checkpoints(stored.checkpoint_folder(self.folder))  # an interrupted training saves without them
        return next((metrics for path in saved if (metrics := stored.read_state(path).metrics)), {})

    @property
    def updates(self) -> int:
        """How many updates the run has been trained for."""
        return self._last_state.update

    @cached_property
    def _last_state(self) -> stored.TrainState:
        return stored.read_state(find_checkpoint(self.folder, read_recipe(self.folder / RECIPE), "last"))

    # ------------------------------------------------------------------ use

    def translator(self, *others: "Run", alignments: bool = False, **decode: Any) -> Translator:
        """Translates many lines. others: runs that form an ensemble with this one. decode: see `DecodeOptions`."""
        models = []
        for run in (self, *others):
            if not isinstance(run.model, Seq2Seq):
                raise ValueError(f"{run.folder} is a run of task {run.recipe.task}; only runs of translation translate")
            for side in ("source", "target"):
                if run.tokenizer(side).fingerprint() != self.tokenizer(side).fingerprint():
                    raise ValueError(f"{run.folder} and {self.folder} have different tokenizers: no ensemble of them")
            models.append(run.model)
        options = self._decode_options(decode)
        return Translator(models, self.tokenizer("source"), self.tokenizer("target"), options, alignments=alignments)

    @overload
    def translate(self, texts: str, **decode: Any) -> str: ...
    @overload
    def translate(self, texts: Sequence[str], **decode: Any) -> list[str]: ...
    def translate(self, texts: str | Sequence[str], **decode: Any) -> str | list[str]:
        """The translation of a text, or of each text of a list. decode: options of `DecodeOptions`, such as `beam`.

        >>> import subquad
        >>> run = subquad.load_run("runs/phrases")
        >>> german = run.translate(["5 km", "3 May"], beam=4)
        >>> len(german)
        2
        """
        given = [texts] if isinstance(texts, str) else texts
        found = [result.text for result in self.translator(**decode).translate(given)]
        return found[0] if isinstance(texts, str) else found

    def hub(self) -> "HubInterface":
        """The same model with the interface of fairseq's hub objects: `translate`, `sample`, `generate`, `score`.

        `subquad.interop.checkpoints.fairseq.hub` gives the same for checkpoints of fairseq.
        """
        from subquad.interop.checkpoints.fairseq.hub_interface import HubInterface

        if isinstance(self.model, Seq2Seq):
            return HubInterface([self.model], {side: self.tokenizer(side) for side in ("source", "target")})
        if isinstance(self.model, LanguageModel):
            return HubInterface([self.model], {"text": self.tokenizer("text")})
        raise ValueError(f"{self.folder} is a run of task {self.recipe.task}, whose models write no text")

    def generator(self, *others: "Run", **decode: Any) -> Generator:
        """Continues many texts. others: runs that form an ensemble with this one. decode: see `DecodeOptions`."""
        models = []
        for run in (self, *others):
            if not isinstance(run.model, LanguageModel):
                raise ValueError(f"{run.folder} is a run of task {run.recipe.task}; only language models generate text")
            models.append(run.model)
        return Generator(models, self.tokenizer("text"), self._decode_options(decode))

    @overload
    def generate(self, prompts: str = "", tokens: int = 100, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str], tokens: int = 100, **options: Any) -> list[str]: ...
    def generate(self, prompts: str | Sequence[str] = "", tokens: int = 100, **options: Any) -> str | list[str]:
        """A text that begins with the prompt, or one for each prompt of a list, with at most `tokens` more tokens.

        options: of `SampleOptions`, such as `temperature`.

        >>> import subquad
        >>> run = subquad.load_run("runs/speeches")
        >>> run.generate("My fellow", tokens=20, temperature=0.8, seed=1).startswith("My fellow")
        True
        """
        given = [prompts] if isinstance(prompts, str) else prompts
        found = self.generator().sample(given, tokens, SampleOptions.parse("sampling", options))
        return found[0].text if isinstance(prompts, str) else [one.text for one in found]

    def classifier(self) -> ImageClassifier | TextLabeller:
        """Classifies many images or texts."""
        task = self.recipe.task_class
        if not issubclass(task, ClassificationTask):
            raise ValueError(f"{self.folder} was trained for {task.name}, not for classification")
        return task.classifier(self.loaded)

    def classify(self, *inputs: str | Path) -> dict[str, ClassProbabilities]:
        """The most probable classes with their probabilities: of images by their names, of texts by themselves.

        inputs: of a classifier of images, files: images, or files of numpy with one or several images. Of a classifier
        of texts, texts as strings, or files with one text each as paths.

        >>> import subquad
        >>> classes = subquad.load_run("runs/digits").classify("images.npy")
        >>> list(classes), len(classes["images.npy[0]"])
        (['images.npy[0]', 'images.npy[1]'], 5)
        """
        classifier = self.classifier()
        files = [str(given) for given in inputs if isinstance(given, Path) or not isinstance(classifier, TextLabeller)]
        found = {name: classes for file in files for name, classes in classifier.classify_file(file)}
        if isinstance(classifier, TextLabeller):
            texts = [given for given in inputs if isinstance(given, str)]
            found |= dict(zip(texts, classifier.classify(texts), strict=True))
        return found

    def _decode_options(self, given: Mapping[str, Any]) -> DecodeOptions:
        """The recipe's section `decode`, with the options that were given; those that are None were not."""
        changes = {name: value for name, value in given.items() if value is not None}
        if "nbest" in changes and "beam" not in changes:
            changes["beam"] = max(self.recipe.decode.beam, changes["nbest"])
        return DecodeOptions.parse("decoding", self.recipe.decode.model_dump() | changes)
