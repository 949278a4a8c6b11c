"""A step of decoding on paper: launches, bytes and times of one token of every hypothesis, and of choosing it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.counting import Kernel, counting
from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda, move_to_fake_cuda
from benchmarks.gpu.hardware import GPU, HOST
from subquad.decode.scoring import Seq2SeqScorer
from subquad.kernels.vocabulary import normalised_largest
from subquad.models import Seq2Seq, build_from_config, preset

PRESET, WORDS, SOURCE = "transformer_wmt_en_de", 32768, 32
BEAM, SENTENCES = 5, (1, 128)


@dataclass(frozen=True)
class Step:
    """kernels: of the model; choosing: of the normaliser and the largest scores; weights: bytes of all weights."""

    kernels: Sequence[Kernel]
    choosing: Sequence[Kernel]
    weights: int

    def microseconds(self, gpu: GPU) -> tuple[float, float, float]:
        """Of the GPU for all, of the GPU for choosing, and of the host that launches all of it."""
        choosing = sum(kernel.seconds(gpu) for kernel in self.choosing)
        step = sum(kernel.seconds(gpu) for kernel in self.kernels) + choosing
        return 1e6 * step, 1e6 * choosing, 1e6 * HOST * (len(self.kernels) + len(self.choosing))


def count_step(sentences: int, dtype: torch.dtype) -> Step:
    """The step of a beam search over as many sentences, in which every hypothesis has two tokens already."""
    model = build_from_config(preset(PRESET) | {"source_vocab": WORDS, "target_vocab": WORDS}).to(dtype).eval()
    assert isinstance(model, Seq2Seq)
    with fake_cuda(), torch.no_grad():
        move_to_fake_cuda(model)
        source = torch.zeros(sentences * BEAM, SOURCE, dtype=torch.int64, device=DEVICE)
        scorer, tokens = Seq2SeqScorer(model, source, None), source[:, 0]
        for _ in range(2):
            scorer.step(tokens)
        with counting() as counter:
            scores = scorer.step(tokens)
            launches = len(counter.kernels)
            normalised_largest(scores.values, 2 * BEAM, hidden=1)
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
    return Step(counter.kernels[:launches], counter.kernels[launches:], weights)
