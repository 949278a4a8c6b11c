"""`subquad info`: what there is, and what one mechanism does."""

import json
from typing import Annotated, Any

import typer

from subquad.cli.output import print_table


def info(
    mechanism: Annotated[str | None, typer.Argument(help="Explain this mechanism; without it, list all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the mechanisms, or explain one: equation, cost, citation, options."""
    from subquad.cli.describe import describe
    from subquad.mixers import available

    if mechanism is not None:
        described = describe(mechanism)
        print(json.dumps(described, indent=2)) if as_json else _explain(described)
        return
    all_described = [describe(name) for name in available()]
    print(json.dumps(all_described, indent=2)) if as_json else _list(all_described)


def _list(all_described: list[dict[str, Any]]) -> None:
    from subquad.cli.describe import TABLE_HEADERS, table_row
    from subquad.mixers import MixerConfig

    common = ", ".join(MixerConfig.model_fields)
    rows = []
    for described in all_described:
        own = [option["name"] for option in described["options"] if option["name"] not in MixerConfig.model_fields]
        rows.append([described["name"], *table_row(described), ", ".join(own)])
    print_table(["mechanism", *TABLE_HEADERS, "options"], rows)
    print(f"\nEvery mechanism also has the options {common}. `subquad info NAME` explains one.")


def _explain(described: dict[str, Any]) -> None:
    from subquad.cli.describe import TABLE_HEADERS, default_text, table_row

    print(f"{described['name']}: {described['idea']}\n")
    for title, text in described["sections"].items():
        print(f"{title}:")
        print("\n".join(f"    {line}".rstrip() for line in text.splitlines()), end="\n\n")
    print("Capabilities:")
    for header, cell in zip(TABLE_HEADERS, table_row(described), strict=True):
        print(f"    {header}: {cell}")
    print("\nOptions:")
    rows = []
    for option in described["options"]:
        kind = f"{option['type']}, {option['limits']}" if option["limits"] else option["type"]
        rows.append([option["name"], kind, default_text(option), option["description"]])
    print_table(["option", "type", "default", "meaning"], rows)
    print(f"\nPython: {described['class']}(dim=256, heads=4)")
