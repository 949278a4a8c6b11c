"""The rows of the reference study: what is trained on what, with which mechanisms, and what papers have for it."""

from dataclasses import dataclass

CAUSAL = ("softmax", "dynamicconv", "eva", "lightconv", "local", "performer", "primal")
BIDIRECTIONAL = (*CAUSAL, "lara", "linformer")
"""Without ra, which costs more than softmax attention, and scatterbrain, for which performer and local stand."""


@dataclass(frozen=True)
class Row:
    """One comparison. name: of its stored result; shown: the task and length, for people.

    mixers: values of --mixers; settings: of --set; lengths: at which costs are measured besides the task's own; data:
    the folder that the recipe reads, if it is not generated; published: what papers have for the task, in a sentence.
    """

    name: str
    shown: str
    recipe: str
    mixers: tuple[str, ...]
    changes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (256, 1024, 4096)
    tune: int = 5
    seeds: int = 3
    data: str = ""
    published: str = ""

    def command(self, out: str, costs: bool = True) -> list[str]:
        """The words of `subquad compare` that compute the row; without costs it may run on a busy machine."""
        words = ["compare", self.recipe, *self.changes]
        words += [word for value in self.mixers for word in ("--mixers", value)]
        words += [word for setting in self.settings for word in ("--set", setting)]
        words += ["--tune", str(self.tune), "--seeds", str(self.seeds)]
        return [*words, "--lengths", ",".join(map(str, self.lengths)) if costs else "", "--out", f"{out}/{self.name}"]


HYBRID = "hybrid=lightconv*1,softmax"
"""One layer of lightweight convolution under one of softmax attention."""
RECALL = (
    "in zoology attention solves the task at every length and width, and convolutions need a width that grows with the "
    "length (Arora et al. 2023, figure 2); its models see 8,192 symbols and more samples."
)
LISTOPS = (
    "Long Range Arena has softmax attention at 36.4 %, Linformer at 35.7, Performer at 18.0 and local attention at 15.8"
    " (Tay et al. 2020, table 1), for 500 to 2,000 symbols and larger models."
)

ROWS = (
    Row("recall-128", "recall, 128", "recall_128", (",".join(CAUSAL), HYBRID), published=RECALL),
    Row(
        "recall-512",
        "recall, 512",
        "recall_128",
        (",".join(CAUSAL), HYBRID),
        changes=(
            "data.options.length=512",
            "model.embedding.max_length=512",
            "train.budget.max_sentences=16",
            "train.updates=2000",
        ),
        published=RECALL,
    ),
    Row(
        "pixels-256",
        "pixels of digits, 256",
        "digits_pixels",
        (",".join(BIDIRECTIONAL),),
        changes=("train.updates=700",),
        settings=("local.window=16",),
    ),
    Row(
        "listops-500",
        "ListOps, up to 500",
        "small/listops",
        (",".join(BIDIRECTIONAL),),
        changes=(
            "data.options={min_length: 250, max_length: 500, depth: 8}",
            "data.max_length=500",
            "train.updates=1500",
        ),
        published=LISTOPS,
    ),
    Row(
        "cifar10-64",
        "CIFAR-10 in patches, 64",
        "cifar10_softmax",
        ("softmax,eva,lara,lightconv,linformer,local,performer",),
        changes=(
            "train.epochs=null",
            "train.updates=3000",
            "schedule:={kind: cosine, lr: 1.0e-3, min_lr: 1.0e-5, warmup_updates: 200}",
        ),
        data="data/cifar10",
    ),
    Row(
        "wikitext2-256",
        "language model of words, 256",
        "wikitext2_softmax",
        ("softmax,eva,lightconv,local", "hybrid=softmax*3,primal"),
        changes=("train.updates=1500",),
        data="data/wikitext2",
    ),
    Row(
        "multi30k",
        "translation, a dozen words",
        "multi30k_softmax",
        ("softmax,dynamicconv,eva,lightconv,local",),
        data="data/multi30k",
    ),
)
