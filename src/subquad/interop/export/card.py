"""Writes the model card of an export: Markdown, with the YAML front matter that the Hugging Face hub reads.

The card says what the model is, what it was trained on, how good it is, where it was trained and how to use it. All of
it comes from the model and from the files of its run, and what is not known is left out, such as the data of a model
that was imported. Because a card is published, absolute paths are shortened to their last name, and text of a run is
escaped: jinja2 escapes HTML, and the filters below keep tables and blocks of code closed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from subquad.compare.variants import mixer_options
from subquad.data.hub import HUB
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
    "text-classifier": ("text-classification", "Text classifier"),
    "vision": ("image-classification", "Vision transformer"),
    "pyramid": ("image-classification", "Pyramid vision transformer"),
}
"""For each kind of model the hub's word for its task, and our words for the model."""
HUB_METRICS = {"bleu": "bleu", "chrf": "chrf", "ppl": "perplexity", "top1": "accuracy"}
"""The metrics that the hub knows, and its names for them."""
TEMPLATE = """---
{{ front_matter | yaml }}---

# {{ title | line }}

{{ what }} of {{ parameters }} parameters. It mixes tokens by {{ mechanisms }}.

## Use

{{ usage }}

## Model

| part | parameters |
| --- | ---: |
{% for name, count in parts.items() -%}
| {{ name | cell }} | {{ count }} |
{% endfor -%}
| all | {{ parameters }} |

{{ config | block }}
{% if data %}
## Data

{{ data | block }}
{% endif %}{% if recipe %}
## Metrics

Checkpoint {{ checkpoint | line }}, {{ when }}.

{% if metrics -%}
| split | metric | value | 95 % interval | computed as |
| --- | --- | ---: | --- | --- |
{% for split, name, value, interval, signature in metrics -%}
| {{ split | cell }} | {{ name | cell }} | {{ value }} | {{ interval }} | {{ signature | code }} |
{% endfor -%}
{% else -%}
It has not been evaluated.
{% endif %}
## Recipe

{{ recipe | block }}
{% endif %}
## Environment

The model was {{ origin | line }} with:

| | |
| --- | --- |
{% for name, value in environment.items() -%}
| {{ name | cell }} | {{ value | cell }} |
{% endfor -%}
"""


def model_card(model: Model, usage: str, run: LoadedRun | None = None, *, library: str = "subquad") -> str:
    """Returns the text of a README.md.

    usage: Markdown that says how this export is used. run: where the model comes from; without it the card has no
    recipe, data and metrics. library: the hub's `library_name`, which says what loads the files.
    """
    title = run.folder.resolve().name if run is not None else f"subquad {model.config.kind}"
    _, what = PURPOSES[model.config.kind]
    config = model.config.model_dump(mode="json", exclude_defaults=True)
    values: dict[str, Any] = {
        "front_matter": _front_matter(model, run, title, library),
        "title": title,
        "what": what,
        "parameters": f"{model.parameter_count():,}",
        "mechanisms": "; ".join(f"{', '.join(names)} ({place})" for place, names in _mechanisms(model)),
        "usage": Markup(usage.strip()),
        "parts": {name: f"{_num_parameters(part):,}" for name, part in model.parts().items()},
        "config": {"kind": model.config.kind, **config},
        "data": None,
        "recipe": None,
        **_origin_and_environment(run),
    }
    if run is not None:
        values |= _run_values(run)
    return _jinja().from_string(TEMPLATE).render(values)


def _run_values(run: LoadedRun) -> dict[str, Any]:
    recipe = shorten_paths(run.recipe.model_dump(mode="json", exclude_defaults=True))
    if not _is_trained(run):  # the file names in its data section are only examples
        del recipe["data"]
    when = f"after {run.update:,} updates" if _is_trained(run) else "as it was imported"
    metrics = list(_metric_rows(run))
    return {
        "recipe": recipe,
        "data": recipe.get("data"),
        "checkpoint": run.checkpoint.name,
        "when": when,
        "metrics": metrics,
    }


def shorten_paths(content: Any) -> Any:
    """Returns plain data in which absolute paths are shortened to their last name."""
    if isinstance(content, Mapping):
        return {key: shorten_paths(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [shorten_paths(value) for value in content]
    return Path(content).name if isinstance(content, str) and Path(content).is_absolute() else content


# ---------------------------------------------------------------------- Markdown


def _jinja() -> Environment:
    jinja = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    jinja.filters |= {"yaml": _yaml, "block": _block, "code": _code, "cell": _cell, "line": _line}
    return jinja


def _yaml(content: Any) -> Markup:
    return Markup(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _block(content: Any) -> Markup:
    """Returns plain data as a block of YAML, inside a fence that its content cannot close."""
    text = _yaml(content)
    fence = "`" * max(3, 1 + _longest_backticks(text))
    return Markup(f"{fence}yaml\n{text}{fence}")


def _code(text: str) -> Markup:
    """Returns a text as code in a cell of a table."""
    if not text:
        return Markup("")
    fence = "`" * (1 + _longest_backticks(text))
    content = " ".join(text.split()).replace("|", "\\|")  # a bar would end the cell, even inside code
    return Markup(f"{fence}{content}{fence}")


def _longest_backticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _line(text: Any) -> Markup:
    """Returns a text as one line of Markdown in which HTML, links and images are shown as they are written."""
    escaped = escape(" ".join(str(text).split()))
    return Markup(re.sub(r"([\\`*\[\]!])", r"\\\1", str(escaped)))


def _cell(text: Any) -> Markup:
    """Returns a text as a cell of a table."""
    return Markup(_line(text).replace("|", "\\|"))


# ---------------------------------------------------------------------- front matter


def _front_matter(model: Model, run: LoadedRun | None, title: str, library: str) -> dict[str, Any]:
    purpose, _ = PURPOSES[model.config.kind]
    mechanisms = dict.fromkeys(name for _, names in _mechanisms(model) for name in names)
    matter: dict[str, Any] = {"library_name": library, "pipeline_tag": purpose, "tags": ["subquad", *mechanisms]}
    if run is None:
        return matter
    if datasets := list(dict.fromkeys(_hub_names(run.recipe.data.model_dump(mode="json")))):
        matter["datasets"] = datasets
    results = [_hub_result(purpose, content) for content in _evaluations(run)]
    if results := [result for result in results if result["metrics"]]:
        matter["metrics"] = list(dict.fromkeys(metric["type"] for result in results for metric in result["metrics"]))
        matter["model-index"] = [{"name": title, "results": results}]
    return matter


def _hub_result(purpose: str, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an evaluation as an entry of the hub's `model-index`."""
    split, samples = evaluation["split"], evaluation["data"]["sha256"]
    metrics = [
        {"type": HUB_METRICS[name], "name": name, "value": metric["value"]}
        for name, metric in evaluation["metrics"].items()
        if name in HUB_METRICS
    ]
    dataset = {"name": f"{split} ({evaluation['samples']} samples)", "type": f"sha256-{samples[:12]}", "split": split}
    return {"task": {"type": purpose}, "dataset": dataset, "metrics": metrics}


def _hub_names(data: Any) -> Iterator[str]:
    """Yields the names of hub data sets among the values of a recipe's data section."""
    if isinstance(data, Mapping | list):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _hub_names(value)
    elif isinstance(data, str) and data.startswith(HUB):
        yield data.removeprefix(HUB).partition("@")[0]


# ---------------------------------------------------------------------- facts


def _mechanisms(model: Model) -> list[tuple[str, list[str]]]:
    """Returns the places of a model that mix tokens, with the different mechanisms in each."""
    found = []
    for place, options in mixer_options(model).items():
        names = options["name"] if isinstance(options["name"], list) else [options["name"]]
        found.append((place, list(dict.fromkeys(names))))
    return found


def _num_parameters(part: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _is_trained(run: LoadedRun) -> bool:
    """Whether the model was trained by subquad, on data and in an environment that the run knows."""
    return not only_imported(run.folder)


def _metric_rows(run: LoadedRun) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields the validation of the checkpoint, then the evaluations of splits with their intervals."""
    for name, value in read_state(run.checkpoint).metrics.items():
        yield "valid, during training", name, f"{value:.4g}", "", ""
    for content in _evaluations(run):
        for name, metric in content["metrics"].items():
            interval = f"{metric['low']:.4g} to {metric['high']:.4g}"
            yield content["split"], name, f"{metric['value']:.4g}", interval, metric["signature"]


def _evaluations(run: LoadedRun) -> list[dict[str, Any]]:
    """Returns what `subquad evaluate` wrote into the run about this checkpoint."""
    files = sorted(run.folder.glob(f"{WHAT}-*.json"))
    found = [read_metadata(path, FORMAT, WHAT) for path in files]
    return [one for one in found if (one.get("checkpoint"), one.get("update")) == (run.checkpoint.name, run.update)]


def _origin_and_environment(run: LoadedRun | None) -> dict[str, Any]:
    """Returns where the model was trained or imported or, without a run that says so, where the card is written."""
    if run is None or not (run.folder / ENVIRONMENT).is_file():
        return {"origin": "written", "environment": environment(torch.device("cpu"))}
    origin = "trained"
    if (path := run.folder / IMPORTED).is_file():
        further = " and trained further" if _is_trained(run) else ""
        origin = f"imported from {json.loads(path.read_text())['origin']}{further}"
    return {"origin": origin, "environment": json.loads((run.folder / ENVIRONMENT).read_text())}
