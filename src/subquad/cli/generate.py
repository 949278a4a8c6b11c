"""`subquad generate`: texts that go on from a prompt."""

import json
from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.translate import changed_options


def generate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="A run directory; several are an ensemble.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="What a text begins with; give it again for more; default: nothing.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a continuation at most.", min=1)] = 100,
    samples: Annotated[int, typer.Option(help="Continuations of each prompt.", min=1)] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    beam: Annotated[int | None, typer.Option(help="Beam search with so many hypotheses.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="Below 1: likelier tokens; above: more surprising ones.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens with this sum.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: said tokens become less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 1,
    int8: Annotated[bool, typer.Option("--int8", help="Weights of 8 bits: faster, less exact.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model; pays on long texts.")] = False,
    checkpoint: Annotated[str, typer.Option(help="best, last, the name of one (such as average), or a path.")] = "best",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines with tokens and log-probabilities.")
    ] = False,
) -> None:
    """Continue texts with a language model.

    Draws by default; --greedy and --beam search instead.

    Examples:
    subquad generate runs/speeches --prompt "My fellow citizens" --top-p 0.9
    subquad generate runs/speeches --samples 3 --tokens 50 --seed 2
    subquad generate runs/speeches --prompt "We have" --beam 4 --json
    """
    from subquad.decode.generate import Generator
    from subquad.decode.options import SampleOptions
    from subquad.models import LanguageModel
    from subquad.train.loaded import load_run

    if beam is not None and greedy:
        raise ValueError("give --greedy or --beam, not both")
    drawing = SampleOptions.parse(
        "drawing",
        {
            "repetition_penalty": repetition_penalty,
            "temperature": 0.0 if greedy else temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
        },
    )
    loaded = [load_run(run, checkpoint) for run in runs]
    models = []
    for one in loaded:
        if not isinstance(one.model, LanguageModel):
            raise ValueError(f"{one.folder} is a run of task {one.recipe.task}; only language models generate text")
        models.append(one.model)
    nbest = samples if beam is not None else None
    given = {"beam": beam, "nbest": nbest, "weights": "int8" if int8 else None, "compile": True if compile else None}
    generator = Generator(models, loaded[0].tokenizer("text"), changed_options(loaded[0].recipe, given))
    prompts = prompt or [""]
    if beam is not None:
        found = [one for several in generator.search(prompts, tokens) for one in several]
    else:
        found = generator.sample([text for text in prompts for _ in range(samples)], tokens, drawing)
    for number, continued in enumerate(found):
        if as_json:
            print(json.dumps({"prompt": prompts[number // samples], **continued._asdict()}, ensure_ascii=False))
        else:
            print(continued.text)
