"""`subquad import`: a checkpoint of another program, or an export of ours, becomes a run directory."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.options import RemoveBpe


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The checkpoint, a .pt file that torch.save wrote, or a folder of `subquad export --to huggingface`.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
    dict_source: Annotated[
        Path | None, typer.Option(help="The dictionary of fairseq for the source, or for a language model's text.")
    ] = None,
    dict_target: Annotated[Path | None, typer.Option(help="The dictionary of fairseq for the target.")] = None,
    codes: Annotated[Path | None, typer.Option(help="The file with the BPE codes of subword-nmt.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The tokenizer.json of a model of crybot/linformer, which is BART's. Without it text goes in and "
            "comes out as its ids."
        ),
    ] = None,
    remove_bpe: RemoveBpe = None,
    moses: Annotated[
        bool,
        typer.Option(
            "--moses/--no-moses", help="Whether text goes through the Moses tokenizer before the BPE codes are applied."
        ),
    ] = True,
) -> None:
    """Import a checkpoint of fairseq and of programs like it.

    A folder that `subquad export --to huggingface` wrote is imported as well. The result is a run directory like those
    of `subquad train`, for translate, generate, classify, evaluate, average and export. The file is read as data, and
    no code in it is run. Dictionaries (dict.LANGUAGE.txt, dict.txt) and codes (bpecodes, code) are looked for beside
    the checkpoint and in the data folder that it names, unless options name them. Further training needs data, as in
    the last example.

    Examples:
    subquad import wmt16.en-de/model.pt --out runs/wmt16
    subquad import checkpoint_best.pt --out runs/iwslt --codes code \\
        --dict-source dict.de.txt --dict-target dict.en.txt
    subquad import checkpoint.pt --out runs/k32 --tokenizer models/facebook/bart-base/tokenizer.json
    subquad import digits-hf --out runs/digits-again
    subquad train runs/wmt16/recipe.yaml --out runs/wmt16 train.updates=60000 \\
        "data.splits.train=[train.en, train.de]" "data.splits.valid=[valid.en, valid.de]"
    """
    from subquad.interop.checkpoints import import_checkpoint
    from subquad.interop.checkpoints.run import TextFiles

    texts = TextFiles(dict_source, dict_target, codes, moses, remove_bpe=remove_bpe, tokenizer=tokenizer)
    imported = import_checkpoint(file, out, texts)
    size = f"{imported.model.parameter_count():,} parameters"
    print(f"{out}: {imported.task} model of {imported.origin}: {size}, update {imported.update:,}")
    for note in imported.notes:
        print(f"note: {note}")
