"""`subquad compare`: mechanisms in one recipe, trained, evaluated and measured, side by side."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from subquad.cli.options import RecipeFile, parse_integer, parse_mixer_options, parse_mixers, split_words
from subquad.cli.output import print_table
from subquad.cli.study import show_study
from subquad.packages import plugins
from subquad.processes import interruptible
from subquad.progress import Progress

if TYPE_CHECKING:
    from subquad.compare import Comparison, Result
    from subquad.compare.comparison import Shard
    from subquad.compare.executors.base import Executor
    from subquad.compare.matching import Match
    from subquad.compare.study import PlannedPart, Study

SETS = {"all", "linear"}
"""Words of --mixers that stand for several mechanisms: for those that the model can have."""
QUICK, FULL = "256,1024,4096", "256,512,1024,2048,4096,8192,16384"


def compare(
    recipe: RecipeFile,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Changes to the recipe, such as train.updates=100."),
    ] = None,
    mixers: Annotated[
        list[str] | None,
        typer.Option(
            help="The mechanisms to compare, separated by commas, each as NAME or LABEL=NAME. The name `recipe` is the "
            "recipe's own model, `linear` stands for all mechanisms of linear memory, and `all` for all. NAME:SET has "
            "published options, which `subquad info NAME` lists. A value with a * is one pattern of layers, such as "
            "hybrid=softmax*5,primal. May be repeated."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="LABEL.OPTION=VALUE",
            help="Set an option of a mechanism (eva.window=64), or change its recipe in the sections model, optim, "
            "schedule and train (eva.schedule.lr=1e-3). May be repeated.",
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]FOLDER", help="Use a finished run instead of training one. May be repeated."),
    ] = None,
    baseline: Annotated[str, typer.Option(help="The mechanism that the others are compared with.")] = "softmax",
    seeds: Annotated[
        str,
        typer.Option(
            help="How many seeds to train with, from the recipe's on, or which, separated by commas. A single one says "
            "nothing about mechanisms: two seeds of one mechanism differ as well."
        ),
    ] = "3",
    tune: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TRIALS",
            help="How many trials each mechanism, the baseline included, gets to find its learning rate, weight decay "
            "and own options, on the validation data. The best settings are then trained with all seeds.",
        ),
    ] = 0,
    match: Annotated[
        str,
        typer.Option(
            help="What all models have as much of as the baseline. With `parameters`, feed-forward networks are as "
            "wide as it takes, within 2 %; with `none` they are as wide as in the recipe."
        ),
    ] = "parameters",
    split: Annotated[
        str | None,
        typer.Option(help="The split to evaluate on. By default it is test, or valid if there is no test."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="The lengths to measure costs at, besides those of the task's own samples. By default they are "
            f'{QUICK}; "" measures no costs.'
        ),
    ] = None,
    quality_lengths: Annotated[
        str,
        typer.Option(
            help="Train, score and measure the recipe at each of these lengths, such as 256,1024,4096, with as many "
            "tokens in an update, and end in one table and a map of decisions by length."
        ),
    ] = "",
    full: Annotated[bool, typer.Option("--full", help=f"Measure costs at {FULL}.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="The tokens of a batch, the same at every length.")] = 16384,
    rounds: Annotated[
        str,
        typer.Option(
            help="Up to three numbers of rounds after which times are looked at; measuring ends at the first look that "
            "decides."
        ),
    ] = "9,18,36",
    margin: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|SHARE%",
            help="A difference in quality that makes no practical difference: 0.5, or 2% of the baseline's value. By "
            "default it is 0.5 BLEU, 1 point of accuracy, or 2% of a perplexity.",
        ),
    ] = None,
    max_seconds: Annotated[
        float,
        typer.Option(help="Do not try a mechanism at longer lengths once its training pass took longer than this."),
    ] = 20,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the comparison. By default it is runs/compare-NAME for the recipe NAME.yaml."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="K/N", help="Do the K-th of N shards of the work, and make no result.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Compute nothing, and make the result of what is there.")
    ] = False,
    executor: Annotated[
        str,
        typer.Option(
            help="Where trainings run: `local` is one after the other in this process, `ray` and `slurm` are as many "
            "at once as a cluster has room for."
        ),
    ] = "local",
    executor_options: Annotated[
        str,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Options of ray and slurm: cpus, gpus, memory (in gigabytes) and retries of a training, the address "
            "of a Ray cluster, the partition and time (in minutes) of Slurm.",
        ),
    ] = "",
    retry: Annotated[bool, typer.Option("--retry", help="Try trainings that failed once more.")] = False,
    floors: Annotated[
        bool,
        typer.Option(
            help="Compare with floors, too: simple models of the data, and a trained model that mixes nothing."
        ),
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be trained and about how long it takes, and train nothing."),
    ] = False,
) -> None:
    """Compare mechanisms in one recipe: quality, and cost by length.

    Each mechanism is trained, evaluated and measured, and swapped into the trained baseline. The command writes
    result.json and report.html, a page that opens offline. The same command goes on where it was interrupted and
    computes nothing twice; several machines may run it at once in a shared folder. The exit code is 1 if a training
    failed, after everything else was done. If RECIPE is a folder, all its recipes are compared, and end in one table.

    Examples:
    subquad compare digits --mixers softmax,eva,lightconv --seeds 5
    subquad compare phrases train.updates=500 --mixers eva,wide=eva --set wide.window=32
    subquad compare phrases --mixers eva --mixers 'hybrid=eva*1,softmax' --set eva.schedule.lr=1e-3
    subquad compare phrases --mixers lightconv,lara --dry-run
    subquad compare small/speeches --mixers lightconv,eva --tune 8 --seeds 3
    subquad compare small/speeches --mixers lightconv,eva --quality-lengths 256,1024,4096
    subquad compare digits --run runs/a --run b=runs/b --baseline a --lengths ""
    subquad compare digits --mixers linear --executor ray --executor-options cpus=2
    subquad compare digits --mixers linear --shard 1/2 --out /shared/digits
    subquad compare digits --merge --out /shared/digits
    """
    from subquad.recipes import find_folder
    from subquad.recipes.schema import check_recipe

    if not merge and find_folder(recipe) is None:
        check_recipe(recipe, changes or [])
    wanted, engine = parse_shard(shard), parse_executor(executor, executor_options)
    out = out or Path("runs") / f"compare-{recipe.stem}"
    from subquad.compare import Comparison
    from subquad.compare.study import Study, plan_study, read_recipes

    if merge and Study.exists(out):
        command = shlex.join(["subquad", *sys.argv[1:]])
        show_study(Study.open(out, baseline, margin).write_report(recipe.stem, command), out)
        return
    if merge:
        comparison = Comparison.open(out, baseline, margin)
    else:
        what: dict[str, Any] = {
            "runs": run or [],
            "baseline": baseline,
            "seeds": parse_seeds(seeds),
            "match": parse_match(match),
            "floors": floors,
        }
        trained_at = [parse_integer("--quality-lengths", word) for word in split_words(quality_lengths)]
        only_applicable = not SETS.isdisjoint(split_words(",".join(mixers or [])))
        recipes = read_recipes(recipe, changes or [])
        parts = plan_study(
            recipes, parse_mixers(mixers or []), trained_at, parse_mixer_options(set_ or []), only_applicable
        )
        if dry_run:
            show_dry_run(parts, what, tune)
            return
        words = split_words(lengths if lengths is not None else FULL if full else QUICK)
        what |= {
            "split": split,
            "lengths": [parse_integer("--lengths", word) for word in words],
            "tokens": tokens,
            "rounds": [parse_integer("--rounds", word) for word in split_words(rounds)],
            "margin": margin,
            "max_seconds": max_seconds,
            "retry": retry,
            "tune": tune,
        }
        if trained_at or find_folder(recipe) is not None:
            if run:
                raise ValueError("--run is for the comparison of one recipe at its own length")
            study = Study.create(parts, out, **what)
            run_comparison(study, wanted, engine)
            if shard is None:
                show_study(study.write_report(recipe.stem, shlex.join(["subquad", *sys.argv[1:]])), out)
            return
        comparison = Comparison.create(parts[0].recipe, out, parts[0].mixers, options=parts[0].options, **what)
        run_comparison(comparison, wanted, engine)
    if shard is None:
        command = _full_command(recipe, changes or [], mixers or [], set_ or [], run or [], comparison)
        show_result(comparison.write_report(recipe.stem, command), out)


def _full_command(
    recipe: Path,
    changes: Sequence[str],
    mixers: Sequence[str],
    settings: Sequence[str],
    runs: Sequence[str],
    comparison: "Comparison",
) -> str:
    """What the reader of the page can type to get the same numbers, with everything that was decided by default."""
    plan = comparison.plan
    words = ["subquad", "compare", str(recipe), *changes]
    trained = [one for one in plan.variants if one.trained and not one.is_floor]
    named = [one.label if one.mixer == one.label else f"{one.label}={one.mixer}" for one in trained]
    words += [word for value in mixers or named for word in ("--mixers", value)]
    words += [word for setting in settings for word in ("--set", setting)]
    seeds = ",".join(map(str, plan.seeds)) + ("," if len(plan.seeds) == 1 else "")  # a number alone is how many
    words += ["--baseline", comparison.baseline, "--seeds", seeds, "--match", plan.match, "--split", plan.split]
    words += [word for run in runs for word in ("--run", run)]
    words += ["--lengths", ",".join(map(str, plan.lengths))]
    words += ["--tokens", str(plan.tokens), "--rounds", ",".join(map(str, plan.looks))]
    words += [] if plan.floors else ["--no-floors"]
    words += ["--tune", str(plan.tune)] if plan.tune else []
    return shlex.join([*words, *(word for module in plugins() for word in ("--plugin", module))])


def run_comparison(
    comparison: "Comparison | Study", shard: "Shard | None" = None, executor: "Executor | None" = None
) -> None:
    """Computes what is not computed yet and shows how it goes on; Ctrl-C and the end of a job's time end it cleanly."""
    from subquad.compare.comparison import EVERYTHING

    with interruptible(), Progress() as progress:
        try:
            comparison.run(progress.report, shard or EVERYTHING, executor)
        except KeyboardInterrupt as error:
            raise type(error)("what was computed and trained is kept, and the same command goes on from it") from None


def show_result(result: "Result", out: Path) -> None:
    """Prints the table and the conclusions; failed trials are an error at the end."""
    table = result.table()
    print_table(table.headers, table.rows, table.numeric)
    print()
    for finding in result.conclusions:
        print(finding.text)
    print(f"\n{out / 'report.html'}: the page; {out / 'result.json'}: every number")
    failed = [
        f"{trial.mechanism}, seed {trial.seed}: {trial.reason}" for trial in result.trials if trial.status == "failed"
    ]
    if failed:
        raise ValueError(f"{len(failed)} of {len(result.trials)} trainings failed ({'; '.join(failed)})")


def show_dry_run(parts: "Sequence[PlannedPart]", what: Mapping[str, Any], tune: int) -> None:
    """Prints the mechanisms with the parameters of their models, what is set for each, its trials, and their time."""
    from subquad.compare.dry_run import estimate_times, plan_mechanisms

    minutes, unknown = 0.0, 0
    for part in parts:
        planned = plan_mechanisms(part.recipe, part.mixers, options=part.options, **what)
        rows = []
        times = estimate_times(part.recipe, planned, tune)
        for one, found in zip(planned, times, strict=True):
            shown = " ".join(f"{name}={value}" for name, value in one.variant.changes.items())
            trials = [f"{seed} ({one.runs[seed]})" if seed in one.runs else str(seed) for seed in one.seeds]
            minutes += found.minutes
            unknown += found.minutes_each is None and found.trials > 0
            took = [f"{found.tuning}", f"{found.trials}", found.shown]
            rows.append([one.variant.label, one.variant.mixer, f"{one.parameters:,}", shown, ", ".join(trials), *took])
        if len(parts) > 1:
            print(part.part.title)
        headers = ["label", "mechanism", "parameters", "settings", "seeds", "tuned in", "trainings", "minutes each"]
        print_table(headers, rows, numeric=[2, 5, 6, 7])
        print()
        for remark in (remark for one in planned for remark in one.variant.remarks):
            print(f"{remark}.")
    if unknown:
        print("The data cannot be read, so nothing is known of trainings that are as long as epochs of it.")
    print(
        f"About {minutes:,.0f} minutes of training in all, estimated from a few updates with random samples on this "
        "machine as it is now; evaluation and measurements come on top. Vocabularies and classes are the recipe's; the "
        "data may have others."
    )


def parse_match(text: str) -> "Match":
    from subquad.compare.matching import Match
    from subquad.config import nearest

    known = get_args(Match)
    if text not in known:
        raise ValueError(f"--match {text}: choose {' or '.join(known)}{nearest(text, known)}")
    return cast("Match", text)


def parse_executor(name: str, options: str) -> "Executor":
    """ "ray", "cpus=2,gpus=1": the executor with these options."""
    from subquad.compare.executors import build_executor

    given = {}
    for word in split_words(options):
        option, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--executor-options {word}: write NAME=VALUE, such as cpus=2,gpus=1")
        given[option.strip()] = value.strip()
    return build_executor(name, given)


def parse_seeds(text: str) -> int | list[int]:
    """ "3": how many; "1,5": which."""
    numbers = [parse_integer("--seeds", word) for word in split_words(text)]
    if "," in text and numbers and min(numbers) >= 0:
        return numbers
    if len(numbers) != 1 or numbers[0] < 1:
        raise ValueError(f"--seeds {text}: give how many (3), or which (1,2,3)")
    return numbers[0]


def parse_shard(text: str | None) -> "Shard | None":
    """ "2/3": the second of three."""
    if text is None:
        return None
    from subquad.compare.comparison import Shard

    number, slash, count = text.partition("/")
    if not slash or not 1 <= parse_integer("--shard", number) <= parse_integer("--shard", count):
        raise ValueError(f"--shard {text}: write K/N with K from 1 to N, such as 2/4")
    return Shard(int(number), int(count))
