"""benchmarks/ctranslate.py: what it writes for CTranslate2 is the same model."""

from pathlib import Path

import pytest
import torch

from benchmarks.ctranslate import save_model
from subquad.models import Seq2Seq, build_from_config

ctranslate2 = pytest.importorskip("ctranslate2", reason="needs CTranslate2: pip install ctranslate2")
PAD, EOS, UNK = 1, 2, 3


def build(mixer: str = "softmax", norm: str = "pre") -> Seq2Seq:
    torch.manual_seed(0)
    stack = {"layers": 2, "heads": 2, "ffn_dim": 48, "norm": norm, "mixer": mixer}
    config = {"kind": "encoder-decoder", "source_vocab": 30, "target_vocab": 40, "dim": 32}
    model = build_from_config({**config, "encoder": stack, "decoder": stack})
    assert isinstance(model, Seq2Seq)
    for parameter in model.parameters():  # biases are zero at first, and would hide a wrong place
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_same_log_probabilities(norm: str, tmp_path: Path) -> None:
    model = build(norm=norm)
    save_model(model, EOS, UNK, tmp_path)
    program = ctranslate2.Translator(str(tmp_path), device="cpu", intra_threads=1)
    draw = torch.Generator().manual_seed(1)
    for length in (1, 5, 9):
        source = torch.randint(4, 30, (length,), generator=draw).tolist()
        target = torch.randint(4, 40, (length + 1,), generator=draw).tolist()
        (scored,) = program.score_batch([[*map(str, source), "</s>"]], [list(map(str, target))])
        logits = model(torch.tensor([[*source, EOS]]), torch.tensor([[EOS, *target]])).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor([*target, EOS])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored.log_probs), expected.detach(), rtol=1e-4, atol=1e-4)


def test_other_mechanisms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CTranslate2 has no lightconv"):
        save_model(build("lightconv"), EOS, UNK, tmp_path)
