"""`subquad compare`: mechanisms in one recipe, trained, evaluated and measured, side by side."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.bench import integer, mechanisms, parse_settings, words_of
from subquad.cli.interrupts import terminated_as_interrupted
from subquad.cli.output import print_table, progress
from subquad.packages import plugins

if TYPE_CHECKING:
    from subquad.compare.comparison import Comparison, Shard
    from subquad.compare.plan import Plan
    from subquad.compare.report.schema import Result

QUICK, FULL = "256,1024,4096", "256,512,1024,2048,4096,8192,16384"


def compare(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file; recipes/ has examples.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Changes to it, such as train.updates=100.")
    ] = None,
    mixers: Annotated[
        str,
        typer.Option(
            help="Mechanisms, separated by commas, each as NAME or LABEL=NAME, where the name `recipe` is the recipe's "
            "own model; or linear, or all."
        ),
    ] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="LABEL.OPTION=VALUE", help="Option of a mechanism; repeatable.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]FOLDER", help="A finished run to take instead of training; repeatable."),
    ] = None,
    baseline: Annotated[str, typer.Option(help="What the others are compared with.")] = "softmax",
    seeds: Annotated[str, typer.Option(help="How many, from the recipe's on; or which, separated by commas.")] = "1",
    split: Annotated[str | None, typer.Option(help="To evaluate on; default: test, or valid without it.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help=f'Lengths to measure costs at; default: {QUICK}; "": none.')
    ] = None,
    full: Annotated[bool, typer.Option("--full", help=f"Measure costs at {FULL}.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a batch, the same at every length.")] = 16384,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats.")] = 3,
    seconds: Annotated[float, typer.Option(help="Leave out longer lengths after a training pass of so many.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="The comparison's folder; default: runs/compare- and the recipe's name.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="K/N", help="Do the K-th of N shards; make no result.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Compute nothing; make the result of what is there.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed trainings once more.")] = False,
) -> None:
    """Compare mechanisms in one recipe: quality, and cost by length.

    Each is trained, evaluated and measured, and its distance from exact attention is shown. Writes result.json and
    report.html, a page that opens offline. The same command goes on where it was interrupted and computes nothing
    twice; several machines may run it at once in a shared folder. The exit code is 1 if a training failed, after
    everything else was done.

    Examples:
    subquad compare recipes/small/digits.yaml --mixers softmax,eva,lightconv --seeds 3
    subquad compare recipes/small/phrases.yaml train.updates=500 --mixers eva,wide=eva --set wide.window=32
    subquad compare recipes/small/digits.yaml --run runs/a --run b=runs/b --baseline a --lengths ""
    subquad compare recipes/small/digits.yaml --mixers linear --only 1/2 --out /shared/digits
    subquad compare recipes/small/digits.yaml --merge --out /shared/digits
    """
    shard = parse_shard(only)
    out = out or Path("runs") / f"compare-{recipe.stem}"
    from subquad.compare.plan import read_plan
    from subquad.train.recipe import read_recipe

    if merge:
        plan = read_plan(out)
    else:
        words = words_of(lengths if lengths is not None else FULL if full else QUICK)
        plan = make_plan(
            read_recipe(recipe, changes or []).model_dump(mode="json"),
            out,
            mixers=mixers,
            options=parse_settings(set_ or []),
            runs=run or [],
            baseline=baseline,
            seeds=seeds,
            split=split,
            lengths=tuple(sorted({integer("--lengths", word) for word in words})),
            tokens=tokens,
            repeats=repeats,
        )
    if baseline not in plan.labels:
        raise ValueError(f"--baseline {baseline}: there is no such mechanism here; there are {', '.join(plan.labels)}")
    given = ["subquad", "compare", str(recipe), *(changes or []), "--mixers", mixers or ",".join(plan.labels)]
    given += [word for setting in set_ or [] for word in ("--set", setting)]
    given += ["--baseline", baseline, "--seeds", ",".join(map(str, plan.seeds)), "--split", plan.split]
    given += [word for one in run or [] for word in ("--run", one)]
    given += ["--lengths", ",".join(map(str, plan.lengths))]
    given += ["--tokens", str(plan.tokens), "--repeats", str(plan.repeats)]
    given += [word for module in plugins() for word in ("--plugin", module)]
    from subquad.compare.comparison import Comparison

    comparison = Comparison(out, plan, baseline, seconds, retry)
    if not merge:
        work(comparison, shard)
    if only is None:
        finish(comparison, recipe.stem, shlex.join(given))


def make_plan(
    recipe: dict[str, Any],
    out: Path,
    *,
    mixers: str,
    options: dict[str, dict[str, Any]],
    runs: list[str],
    baseline: str,
    seeds: str,
    split: str | None,
    **measured: Any,
) -> "Plan":
    """The plan of a comparison, checked as a whole before anything is computed; measured: lengths, tokens, repeats."""
    from subquad.compare.comparison import open_task, split_of
    from subquad.compare.plan import Plan, open_plan
    from subquad.compare.variants import variants_of, with_runs
    from subquad.train.recipe import Recipe

    if not mixers and not runs:
        raise ValueError("say what to compare: --mixers lightconv,eva, or finished runs with --run")
    read = Recipe.parse("recipe", recipe)
    variants = variants_of(read, mechanisms(mixers), options, baseline) if mixers else []
    variants, taken = with_runs(read, variants, runs)
    task = open_task(read, out)
    plan = Plan(
        recipe=recipe,
        decided=task.data_dependent_model_config(),
        variants=tuple(variants),
        seeds=parse_seeds(seeds, read.train.seed),
        split=split_of(task, split),
        runs=tuple(taken),
        **measured,
    )
    return open_plan(plan, out)


def work(comparison: "Comparison", shard: "Shard") -> None:
    """Computes what is open; Ctrl-C and the end of a job's time leave something to go on with."""
    with terminated_as_interrupted(), progress(comparison.steps(shard)) as step:
        comparison.run(step, shard)


def finish(comparison: "Comparison", title: str, command: str) -> None:
    """Writes the result and the page, and prints table and conclusions; failed trials are an error at the end."""
    from subquad.compare.report.assemble import assemble
    from subquad.compare.report.html import write_page
    from subquad.compare.report.schema import write_result

    out = comparison.out
    result = assemble(out, comparison.plan, comparison.baseline, title, command)
    write_result(result, out / "result.json")
    write_page(result, out / "report.html")
    show(result)
    print(f"\n{out / 'report.html'}: the page; {out / 'result.json'}: every number")
    failed = [
        f"{trial.mechanism}, seed {trial.seed}: {trial.reason}" for trial in result.trials if trial.status == "failed"
    ]
    if failed:
        raise ValueError(f"{len(failed)} of {len(result.trials)} trainings failed ({'; '.join(failed)})")


def show(result: "Result") -> None:
    """The table, and the conclusions below it."""
    from subquad.compare.report.conclusions import conclusions
    from subquad.compare.report.table import table

    shown = table(result)
    print_table(shown.headers, shown.rows, shown.numeric)
    print()
    for finding in conclusions(result):
        print(f"{finding.text}{f' {finding.detail}' if finding.detail else ''}")


def parse_seeds(text: str, first: int) -> tuple[int, ...]:
    """ "3": three, from `first` on; "1,5": these."""
    words = words_of(text)
    numbers = [integer("--seeds", word) for word in words]
    if "," in text and numbers and min(numbers) >= 0:
        return tuple(dict.fromkeys(numbers))
    if len(numbers) != 1 or numbers[0] < 1:
        raise ValueError(f"--seeds {text}: give how many (3), or which (1,2,3)")
    return tuple(range(first, first + numbers[0]))


def parse_shard(text: str | None) -> "Shard":
    """ "2/3": the second of three."""
    from subquad.compare.comparison import ALL, Shard

    if text is None:
        return ALL
    number, slash, of = text.partition("/")
    if not slash or not 1 <= integer("--only", number) <= integer("--only", of):
        raise ValueError(f"--only {text}: write K/N with K from 1 to N, such as 2/4")
    return Shard(int(number), int(of))
