"""Swapped models are saved by transformers, and loaded by it and by subquad with their mixers, or not at all."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from tests.interop.swap_hosts import DECODERS, ENCODERS, TRANSLATORS, inputs, tiny, tokens_and_mask, transformers

BERT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": DECODERS["llama"],
    "gemma3": DECODERS["gemma3"],
    "modernbert": ENCODERS["modernbert"],
    "bert": ("BertForMaskedLM", BERT),
}

AUTO_CLASSES = {
    "LlamaForCausalLM": transformers.AutoModelForCausalLM,
    "Gemma3ForCausalLM": transformers.AutoModelForCausalLM,
    "ModernBertModel": transformers.AutoModel,
    "BertForMaskedLM": transformers.AutoModelForMaskedLM,
}


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    tokens, mask = tokens_and_mask("right")
    return model(tokens, attention_mask=mask)[0]


@pytest.mark.parametrize("host", HOSTS)
def test_a_swapped_model_is_loaded_as_it_was_saved(host: str, tmp_path: Path) -> None:
    model = tiny(*HOSTS[host])
    subquad.swap(model, "eva", window=4, chunk_size=2, relative="t5", layers=[0])
    subquad.swap(model, "local", window=3, layers=[1])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(tokens_and_mask()[0])[0].square().mean().backward()
    optimiser.step()
    model.eval().save_pretrained(tmp_path, max_shard_size="20KB")  # several files
    loaded = subquad.load_swapped(tmp_path)
    assert torch.equal(outputs(loaded), outputs(model))
    assert {name: tensor.shape for name, tensor in loaded.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    loaded.save_pretrained(tmp_path / "again")
    again = subquad.load_swapped(tmp_path / "again", dtype=torch.float64)
    assert torch.allclose(outputs(again).float(), outputs(model), atol=1e-5)
    for kind in (transformers.AutoModel, AUTO_CLASSES[HOSTS[host][0]]):  # a part of the model, and the whole
        plain = kind.from_pretrained(tmp_path)
        assert type(plain).__module__ == type(model).__module__
        whole = type(plain) is type(model)
        assert torch.equal(outputs(plain), outputs(model if whole else model.base_model))
    with pytest.raises(ValueError, match=r"subquad_swap|load_swapped"):
        outputs(type(model).from_pretrained(tmp_path))


@pytest.fixture(scope="module")
def swapped() -> Any:
    model = tiny(*HOSTS["llama"])
    subquad.swap(model, "performer")
    return model


def test_a_repository_of_the_hub(swapped: Any, tmp_path: Path) -> None:
    """By its name, from the folder where huggingface_hub keeps what it downloaded."""
    repository = tmp_path / "models--somebody--llama-performer"
    swapped.save_pretrained(repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123abcd")
    where = {"cache_dir": tmp_path, "local_files_only": True}
    loaded = subquad.load_swapped("somebody/llama-performer", dtype=torch.float32, **where)
    assert torch.equal(outputs(loaded), outputs(swapped))


def test_a_config_builds_a_swapped_model(swapped: Any) -> None:
    """A new one, with an Auto class; configs are copied and pickled with their models."""
    config = pickle.loads(pickle.dumps(swapped.config))
    assert (config.model_type, type(config)) == ("llama", type(swapped.config))
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    fresh.load_state_dict(swapped.state_dict())
    assert torch.equal(outputs(fresh.eval()), outputs(swapped))


def test_weights_of_mixers_must_be_there(tmp_path: Path) -> None:
    model = tiny(*HOSTS["llama"])
    subquad.swap(model, "eva", window=4)
    kept = {name: value for name, value in model.state_dict().items() if ".subquad." not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ValueError, match=r"no weights for model\.layers\.0\.self_attn\.subquad"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_types_that_transformers_does_not_know(swapped: Any, tmp_path: Path) -> None:
    swapped.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["model_type"], stored["swapped_model_type"]) == ("subquad_swapped", "llama")
    (tmp_path / "config.json").write_text(json.dumps(stored | {"swapped_model_type": "lama"}))
    with pytest.raises(ValueError, match="'lama', which this version of transformers does not know"):
        subquad.load_swapped(tmp_path)


VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}


@torch.no_grad()
def test_weights_are_found_where_transformers_writes_older_names(tmp_path: Path) -> None:
    model = tiny("ViTForImageClassification", VIT)
    subquad.swap(model, "lara", landmarks=4)
    pixels = torch.randn(2, 3, 16, 16)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    for folder in (tmp_path, tmp_path / "new"):
        assert torch.equal(subquad.load_swapped(folder)(pixels)[0], model(pixels)[0])


def test_biases_of_t5_are_loaded_with_the_mixers(tmp_path: Path) -> None:
    model = tiny(*TRANSLATORS["t5"])
    subquad.swap(model, "local", window=3)
    model.get_submodule("encoder.block.1.layer.0.SelfAttention.subquad.mixer.bias").table.data.add_(0.5)
    model.save_pretrained(tmp_path)
    loaded = subquad.load_swapped(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs("t5")).logits, model(**inputs("t5")).logits)


def test_the_trainer_saves_a_swapped_model(tmp_path: Path) -> None:
    model = tiny(*HOSTS["llama"])
    subquad.swap(model, "eva", window=4, chunk_size=2)
    settings = {"max_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    rows = [{"input_ids": row, "labels": row} for row in tokens_and_mask()[0]]
    trainer = transformers.Trainer(model, transformers.TrainingArguments(tmp_path, **settings), train_dataset=rows)
    trainer.train()
    assert torch.equal(outputs(subquad.load_swapped(tmp_path / "checkpoint-2")), outputs(model.eval()))


def test_undo_makes_the_config_what_it_was(tmp_path: Path) -> None:
    model = tiny(*HOSTS["bert"])
    model.save_pretrained(tmp_path)  # which adds to the config itself
    before = model.config.to_dict()
    first = subquad.swap(model, "performer", layers=[0])
    second = subquad.swap(model, "lightconv", layers=[1], kernel_size=3)
    first.undo()
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["subquad_swap"] == [{"mixer": "lightconv", "layers": [1], "options": {"kernel_size": 3}}]
    assert torch.equal(outputs(subquad.load_swapped(tmp_path)), outputs(model))
    second.undo()
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(outputs(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "plain")), outputs(model))
    with pytest.raises(ValueError, match="no swapped model"):
        subquad.load_swapped(tmp_path / "plain")
