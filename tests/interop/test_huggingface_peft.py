"""LoRA of the real PEFT on our classes: it trains, alone, reaches every mechanism, and merges into the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'subquad[hf]'")

import transformers as hf

from subquad.interop.huggingface.saving import wrap
from subquad.models import build_model
from subquad.testing import enlarge
from tests.interop.huggingface_cases import CASES, EOS, VOCAB, Case, padded
from tests.models.cases import OPTIONS, able

peft = pytest.importorskip("peft", reason="pip install peft")

TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "text classifier": "SEQ_CLS", "masked": None, "vision": None}
"""PEFT's word for the task of each case; None: it has none."""
STACK = {"layers": 1, "heads": 2, "ffn_dim": 24}
MECHANISMS = [
    *((where, name, OPTIONS.get(name, {})) for where in ("encoder", "decoder", "cross") for name in able(where)),
    ("encoder", "eva", {"window": 4, "landmarks": 4, "overlap": True}),
    ("encoder", "lara", {"landmarks": 4, "proposal": "adaptive"}),
    ("encoder", "performer", {"features": 8, "feature_map": "mlp-fourier"}),
]


def adapt(model: Any, **options: Any) -> Any:
    """The model with LoRA in all of its linear maps."""
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", **options))


def disturb(model: Any) -> None:
    """Sets the adapters to random weights; new ones are 0 and change nothing."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))


@pytest.mark.parametrize("name", TASKS)
def test_adapters_train_and_merge(name: str, tmp_path: Path) -> None:
    """Only adapters (and the head of a classifier) learn; saved, loaded and merged they give the same outputs."""
    case: Case = CASES[name]
    base, given = case.model(), case.inputs()
    before = {key: value.clone() for key, value in base.named_parameters()}
    heads = {"modules_to_save": ["head"]} if name == "text classifier" else {}
    model = adapt(base, task_type=TASKS[name], **heads)
    first = model(**given).loss
    torch.testing.assert_close(first, case.model()(**given).loss)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
    assert loss < first
    for key, value in before.items():
        frozen = key.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
        names = dict(base.named_parameters())
        kept = names.get(key, names.get(frozen, names.get(key.replace("head.", "head.original_module."))))
        assert kept is not None, key
        assert torch.equal(kept, value), key
    model.eval()
    expected = model(**given).logits
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(case.model(), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**given).logits, expected, atol=1e-6, rtol=1e-6)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(**given).logits, expected, atol=1e-5, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = case.auto.from_pretrained(tmp_path / "merged")
    assert torch.equal(again(**given).logits, merged(**given).logits)


def mechanism(where: str, name: str, options: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with a mechanism in a place, and inputs with padding."""
    torch.manual_seed(0)
    choice = {"name": name, **options}
    given = padded([[EOS, *range(4, 4 + length)] for length in (16, 9)], "right")
    if where == "encoder":
        encoder = {**STACK, "mixer": choice}
        model = build_model("text-classifier", dim=16, vocab=VOCAB, num_classes=3, encoder=encoder)
        given["labels"] = torch.tensor([0, 2])
    elif where == "decoder":
        model = build_model("language-model", dim=16, vocab=VOCAB, decoder={**STACK, "mixer": choice})
        given["labels"] = given["input_ids"]
    else:
        stacks = {"encoder": STACK, "decoder": {**STACK, "cross": choice}}
        model = build_model("encoder-decoder", dim=16, source_vocab=VOCAB, target_vocab=VOCAB, **stacks)
        given |= {"decoder_input_ids": given["input_ids"][:, :5], "labels": given["input_ids"][:, :5]}
    enlarge(model)
    return wrap(model, pad_token_id=1, eos_token_id=EOS), given


@pytest.mark.parametrize(
    ("where", "name", "options"), [pytest.param(*row, id=f"{row[0]}-{row[1]}-{len(row[2])}") for row in MECHANISMS]
)
def test_every_mechanism_computes_with_its_adapters(where: str, name: str, options: dict[str, Any]) -> None:
    """What adapters of all linear maps change, they change as the merged weights do, and gradients reach them all."""
    plain, given = mechanism(where, name, options)

    def outputs(model: Any) -> torch.Tensor:
        torch.manual_seed(1)  # some mechanisms draw whenever they compute
        return model(**given).logits

    torch.manual_seed(1)
    plain(**given).loss.backward()
    used = [key.removesuffix(".weight") for key, value in plain.named_parameters() if value.grad is not None]
    plain.zero_grad()
    expected = outputs(plain)
    model = adapt(plain).eval()
    torch.testing.assert_close(outputs(model), expected, atol=1e-5, rtol=1e-4)
    disturb(model)
    torch.manual_seed(1)
    output = model(**given)
    assert (output.logits - expected).abs().max() > 1e-3
    output.loss.backward()
    adapters = {
        key: value.grad
        for key, value in model.named_parameters()
        if "lora_" in key and key.removeprefix("base_model.model.").partition(".lora_")[0] in used
    }
    assert len(adapters) >= 8
    assert not [key for key, gradient in adapters.items() if gradient is None or not gradient.abs().sum() > 0]
    torch.testing.assert_close(outputs(model.merge_and_unload()), output.logits.detach(), atol=1e-4, rtol=1e-4)


def test_generation_with_adapters() -> None:
    """A model with adapters generates over its streaming state what it generates without one."""
    model, given = CASES["causal"].model(), CASES["causal"].inputs()
    given.pop("labels")
    adapted = adapt(model, task_type="CAUSAL_LM").eval()
    disturb(adapted)
    options = {"max_new_tokens": 6, "do_sample": False}
    found = [adapted.generate(**given, **options, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*found)


def test_adapters_are_loaded_by_transformers(tmp_path: Path) -> None:
    """`from_pretrained` of a folder with an adapter loads the base model and the adapter."""
    base, given = CASES["causal"].model(), CASES["causal"].inputs()
    base.save_pretrained(tmp_path / "base")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = adapt(loaded, task_type="CAUSAL_LM").eval()
    disturb(adapted)
    expected = adapted(**given).logits
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    torch.testing.assert_close(again(**given).logits, expected, atol=1e-6, rtol=1e-6)
