"""`subquad generate`: texts that go on from a prompt."""

import json
from typing import Annotated

import typer

from subquad.cli.options import (
    Bfloat16,
    Checkpoint,
    Compile,
    Graphs,
    Int8,
    RunFolders,
    refuse_other_folders,
    weights_option,
)


def generate(
    runs: RunFolders,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="The beginning of the text. Give the option several times for several texts."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="A continuation has at most this many tokens.", min=1)] = 100,
    samples: Annotated[int, typer.Option(help="How many continuations to write for each prompt.", min=1)] = 1,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take the most probable token every time instead of sampling.")
    ] = False,
    beam: Annotated[
        int | None, typer.Option(help="Use beam search with this many hypotheses instead of sampling.", min=1)
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Below 1, probable tokens become more probable; above 1, less.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Sample from the K most probable tokens only; 0 stands for all tokens.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most probable tokens only, as many as reach this probability.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that the text has already become less probable.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The seed of the random numbers.")] = 1,
    int8: Int8 = False,
    bfloat16: Bfloat16 = False,
    compile: Compile = False,
    graphs: Graphs = False,
    checkpoint: Checkpoint = "best",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each text, with tokens and log-probabilities.")
    ] = False,
) -> None:
    """Continue texts with a language model.

    Tokens are sampled unless --greedy or --beam is given.

    Examples:
    subquad generate runs/speeches --prompt "My fellow citizens" --top-p 0.9
    subquad generate runs/speeches --samples 3 --tokens 50 --seed 2
    subquad generate runs/speeches --prompt "We have" --beam 4 --json
    """
    refuse_other_folders(runs[0])
    from subquad.api import load_run
    from subquad.decode.options import SampleOptions

    if beam is not None and greedy:
        raise ValueError("give --greedy or --beam, not both")
    sampling = SampleOptions.parse(
        "sampling",
        {
            "repetition_penalty": repetition_penalty,
            "temperature": 0.0 if greedy else temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
        },
    )
    first, *others = [load_run(run, checkpoint) for run in runs]
    nbest = samples if beam is not None else None
    generator = first.generator(
        *others,
        beam=beam,
        nbest=nbest,
        weights=weights_option(int8, bfloat16),
        compile=compile or None,
        graphs=graphs or None,
    )
    prompts = prompt or [""]
    if beam is not None:
        found = [one for several in generator.search(prompts, tokens) for one in several]
    else:
        found = generator.sample([text for text in prompts for _ in range(samples)], tokens, sampling)
    for number, continued in enumerate(found):
        if as_json:
            print(json.dumps({"prompt": prompts[number // samples], **continued._asdict()}, ensure_ascii=False))
        else:
            print(continued.text)
