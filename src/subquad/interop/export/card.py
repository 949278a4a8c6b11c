"""The model card that goes with every export: Markdown, with the YAML front matter that the Hugging Face hub reads.

It says what the model is, what it learned from, how good it is, where it was trained and how to use it. Everything
comes from the model and from the files of its run; what is not known is left out, such as the data of a model that was
imported. Absolute paths are shortened to their last name, since a card is published.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from subquad.compare.variants import mixer_options
from subquad.environment import environment
from subquad.evaluate.report import FORMAT, WHAT
from subquad.files import read_metadata
from subquad.models import Model
from subquad.train.checkpoint import read_state
from subquad.train.run import ENVIRONMENT, IMPORTED, LoadedRun, only_imported

CARD = "README.md"
"""The name under which the hub looks for a card."""
PURPOSES = {
    "encoder-decoder": ("translation", "Encoder-decoder"),
    "language-model": ("text-generation", "Language model"),
    "masked-language-model": ("fill-mask", "Masked language model"),
    "text-classifier": ("text-classification", "Classifier of text"),
    "vision": ("image-classification", "Vision transformer"),
    "pyramid": ("image-classification", "Pyramid vision transformer"),
}
"""The hub's word for what a kind of model does, and ours for what it is."""
HUB_METRICS = {"bleu": "bleu", "chrf": "chrf", "ppl": "perplexity", "top1": "accuracy"}
"""Metrics that the hub knows, under its names."""


def model_card(model: Model, usage: str, run: LoadedRun | None = None, *, library: str = "subquad") -> str:
    """The text of a README.md.

    usage: Markdown that tells how this export is used. run: where the model comes from; without one the card has no
    recipe, data and metrics. library: the hub's `library_name`, which says what loads the files.
    """
    title = run.folder.resolve().name if run is not None else f"subquad {model.config.kind}"
    parts = [f"# {title}", _summary(model), "## Use", usage.strip(), "## Model", _architecture(model)]
    if run is not None:
        recipe = published(run.recipe.model_dump(mode="json", exclude_defaults=True))
        if not _is_trained(run):  # its data section has names that stand for what nobody told
            del recipe["data"]
        parts += ["## Data", _fenced(recipe["data"])] if "data" in recipe else []
        parts += ["## Metrics", _metrics_table(run), "## Recipe", _fenced(recipe)]
    parts += ["## Environment", _environment(run)]
    return f"---\n{_yaml(_front_matter(model, run, title, library))}---\n\n" + "\n\n".join(parts) + "\n"


def published(content: Any) -> Any:
    """Plain data with absolute paths shortened to their last name."""
    if isinstance(content, Mapping):
        return {key: published(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [published(value) for value in content]
    return Path(content).name if isinstance(content, str) and Path(content).is_absolute() else content


# ---------------------------------------------------------------------- front matter


def _front_matter(model: Model, run: LoadedRun | None, title: str, library: str) -> dict[str, Any]:
    purpose, _ = PURPOSES[model.config.kind]
    mechanisms = dict.fromkeys(name for _, names in _mechanisms(model) for name in names)
    matter: dict[str, Any] = {"library_name": library, "pipeline_tag": purpose, "tags": ["subquad", *mechanisms]}
    if run is None:
        return matter
    if datasets := list(dict.fromkeys(_hub_names(run.recipe.data.model_dump(mode="json")))):
        matter["datasets"] = datasets
    results = [_result(purpose, content) for content in _evaluations(run)]
    if results := [result for result in results if result["metrics"]]:
        matter["metrics"] = list(dict.fromkeys(metric["type"] for result in results for metric in result["metrics"]))
        matter["model-index"] = [{"name": title, "results": results}]
    return matter


def _result(purpose: str, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation as an entry of the hub's `model-index`."""
    split, samples = evaluation["split"], evaluation["data"]["sha256"]
    metrics = [
        {"type": HUB_METRICS[name], "name": name, "value": metric["value"]}
        for name, metric in evaluation["metrics"].items()
        if name in HUB_METRICS
    ]
    dataset = {"name": f"{split} ({evaluation['samples']} samples)", "type": f"sha256-{samples[:12]}", "split": split}
    return {"task": {"type": purpose}, "dataset": dataset, "metrics": metrics}


def _hub_names(data: Any) -> Iterator[str]:
    """Names of the hub's data sets among the values of a recipe's data section."""
    if isinstance(data, Mapping | list):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _hub_names(value)
    elif isinstance(data, str) and data.startswith("hub:"):
        yield data.removeprefix("hub:").partition("@")[0]


# ---------------------------------------------------------------------- sections


def _summary(model: Model) -> str:
    _, what = PURPOSES[model.config.kind]
    mixing = "; ".join(f"{place}: {', '.join(names)}" for place, names in _mechanisms(model))
    return f"{what} of {model.parameter_count():,} parameters. What mixes tokens: {mixing}."


def _mechanisms(model: Model) -> list[tuple[str, list[str]]]:
    """Places of a model and the mechanisms that stand there, each once."""
    found = []
    for place, options in mixer_options(model).items():
        names = options["name"] if isinstance(options["name"], list) else [options["name"]]
        found.append((place, list(dict.fromkeys(names))))
    return found


def _architecture(model: Model) -> str:
    rows = ["| part | parameters |", "| --- | ---: |"]
    rows += [f"| {name} | {_own_count(part):,} |" for name, part in model.parts().items()]
    rows.append(f"| all | {model.parameter_count():,} |")
    config = model.config.model_dump(mode="json", exclude_defaults=True)
    return "\n".join(rows) + "\n\n" + _fenced({"kind": model.config.kind, **config})


def _own_count(part: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _origin(run: LoadedRun) -> str | None:
    """The program and architecture that a run was imported from; None: it began here."""
    path = run.folder / IMPORTED
    return json.loads(path.read_text())["origin"] if path.is_file() else None


def _is_trained(run: LoadedRun) -> bool:
    """Whether the model was trained here, on data and in an environment that the run knows."""
    return not only_imported(run.folder)


def _metrics_table(run: LoadedRun) -> str:
    """Validation of the checkpoint, then evaluations of splits with their intervals."""
    state = read_state(run.checkpoint)
    rows = ["| split | metric | value | 95 % interval | computed as |", "| --- | --- | ---: | --- | --- |"]
    rows += [f"| valid, during training | {name} | {value:.4g} | | |" for name, value in state.metrics.items()]
    for content in _evaluations(run):
        for name, metric in content["metrics"].items():
            interval = f"{metric['low']:.4g} to {metric['high']:.4g}"
            how = metric["signature"].replace("|", "\\|")  # in a table also code is cut at bars
            rows.append(f"| {content['split']} | {name} | {metric['value']:.4g} | {interval} | `{how}` |")
    when = f"after {run.update:,} updates" if _is_trained(run) else "as it was imported"
    head = f"Checkpoint {run.checkpoint.name}, {when}."
    return head + "\n\n" + ("\n".join(rows) if len(rows) > 2 else "It has not been evaluated.")


def _evaluations(run: LoadedRun) -> list[dict[str, Any]]:
    """What `subquad evaluate` wrote into the run about this very checkpoint."""
    files = sorted(run.folder.glob(f"{WHAT}-*.json"))
    found = [read_metadata(path, FORMAT, WHAT) for path in files]
    return [one for one in found if (one.get("checkpoint"), one.get("update")) == (run.checkpoint.name, run.update)]


def _environment(run: LoadedRun | None) -> str:
    """Where the model was trained or imported, or, without a run that says so, where the card is written."""
    found, done = environment(torch.device("cpu")), "written"
    if run is not None and (run.folder / ENVIRONMENT).is_file():
        found, done = json.loads((run.folder / ENVIRONMENT).read_text()), "trained"
        if (origin := _origin(run)) is not None:
            done = f"imported from {origin}{' and trained further' if _is_trained(run) else ''}"
    rows = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in found.items())]
    return f"The model was {done} with:\n\n" + "\n".join(rows)


def _fenced(content: Any) -> str:
    return f"```yaml\n{_yaml(content)}```"


def _yaml(content: Any) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
