"""`subquad info`: what there is, and what one mechanism or one model does."""

import json
import warnings
from typing import Annotated, Any

import typer

from subquad.cli.options import AsJson
from subquad.cli.output import print_table


def info(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The mechanism or model preset to explain. Without it, all are listed."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="The length at which the costs of a preset are estimated; default: 256.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="The batch size at which they are estimated; default: 1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the mechanisms and presets, or explain one.

    A mechanism is explained by its equation, cost, citation and options. A preset is explained by its architecture, its
    parameters, and an estimate of its compute and memory at a given length and batch size.

    Examples:
    subquad info
    subquad info eva
    subquad info lightconv_iwslt_de_en --length 128 --batch 32
    subquad info --json
    """
    from subquad.mixers import available
    from subquad.models import PRESETS
    from subquad.models.describe import describe, describe_preset
    from subquad.models.presets import OTHER_NAMES

    name = OTHER_NAMES.get(name, name) if name is not None else None
    if name not in [*available(), *PRESETS, None]:
        raise ValueError(_unknown(str(name), [*available(), *PRESETS]))
    if name not in PRESETS and (length, batch) != (None, None):
        measured = f"`subquad bench --mixers {name or 'NAME'} --lengths 256,1024`"
        raise ValueError(f"--length and --batch are for presets; {measured} measures what a mechanism costs")
    if name is None:
        described = {"mechanisms": _describe_all(), "presets": list(PRESETS)}
        print(json.dumps(described, indent=2)) if as_json else _list(described)
    elif name in PRESETS:
        preset = describe_preset(name, batch or 1, length or 256)
        print(json.dumps(preset, indent=2)) if as_json else _explain_preset(preset)
    else:
        mechanism = describe(name)
        print(json.dumps(mechanism, indent=2)) if as_json else _explain(mechanism)


def _describe_all() -> list[dict[str, Any]]:
    """All that can be loaded: a broken package is a warning that names it, and hides no other mechanism."""
    from subquad.mixers.registry import loadable
    from subquad.models.describe import describe

    names, problems = loadable()
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    return [describe(name) for name in names]


def _unknown(name: str, known: list[str]) -> str:
    from subquad.config import nearest

    return f"no mechanism or preset is called {name!r}{nearest(name, known)} `subquad info` lists them."


def _list(described: dict[str, Any]) -> None:
    from subquad.mixers import MixerConfig
    from subquad.models.describe import TABLE_HEADERS, table_row

    common = ", ".join(MixerConfig.model_fields)
    rows = []
    for mechanism in described["mechanisms"]:
        own = [option["name"] for option in mechanism["options"] if option["name"] not in MixerConfig.model_fields]
        rows.append([mechanism["name"], *table_row(mechanism), ", ".join(own)])
    print_table(["mechanism", *TABLE_HEADERS, "options"], rows)
    print(f"\nEvery mechanism also has the options {common}.")
    print(f"\nPresets of models: {', '.join(described['presets'])}.")
    print("\n`subquad info NAME` explains a mechanism or a preset.")


def _explain(described: dict[str, Any]) -> None:
    from subquad.models.describe import TABLE_HEADERS, default_text, table_row

    print(f"{described['name']}: {described['idea']}\n")
    for title, text in described["sections"].items():
        print(f"{title}:")
        print("\n".join(f"    {line}".rstrip() for line in text.splitlines()), end="\n\n")
    print("Capabilities:")
    for header, cell in zip(TABLE_HEADERS, table_row(described), strict=True):
        print(f"    {header}: {cell}")
    for title, key in (("memory linear in the length", "linear"), ("outputs are averages of values", "averages")):
        print(f"    {title}: {'yes' if described['capabilities'][key] else 'no'}")
    print("\nOptions:")
    rows = []
    for option in described["options"]:
        kind = f"{option['type']}, {option['limits']}" if option["limits"] else option["type"]
        rows.append([option["name"], kind, default_text(option), option["description"]])
    print_table(["option", "type", "default", "meaning"], rows)
    if described["published"]:
        print("\nPublished options, which `subquad compare --mixers NAME:SET` takes:")
        for name, options in described["published"].items():
            given = ", ".join(f"{option}={value}" for option, value in options.items())
            print(f"    {described['name']}:{name}    {given}")
    print(f"\nPython: {described['class']}(dim=256, heads=4)")


def _explain_preset(described: dict[str, Any]) -> None:
    print(f"{described['name']}: {described['kind']}\n")
    print_table(["part", "parameters", "architecture"], described_parts(described), numeric=[1])
    costs, batch, length = described["costs"], described["batch"], described["length"]
    size = f"batch {batch}" if described["images"] else f"batch {batch}, {length} tokens"
    print(f"\nEstimates for {size}, in float32, plain form of the mechanisms:")
    rows = [
        ["FLOPs per token, forward", f"{costs['flops_per_token'] / 1e6:,.1f} M"],
        ["FLOPs of a forward pass", f"{costs['flops'] / 1e9:,.2f} G"],
        ["training memory", _megabytes(costs["training_bytes"])],
        ["    of which kept for backward", _megabytes(costs["activation_bytes"])],
        ["decoding memory", _megabytes(costs["decoding_bytes"])],
        ["    of which streaming state", _megabytes(costs["state_bytes"])],
    ]
    print_table(["cost", "estimate"], rows, numeric=[1])
    print(f'\nPython: subquad.models.build_model("{described["name"]}")')


def described_parts(described: dict[str, Any]) -> list[list[str]]:
    rows = [[part["name"], f"{part['parameters']:,}", part["architecture"]] for part in described["parts"]]
    return [*rows, ["in all", f"{described['parameters']:,}", ""]]


def _megabytes(count: int | None) -> str:
    return "does not stream" if count is None else f"{count / 1e6:,.1f} MB"
