"""What transformers' own tests demand of every model, written anew for ours. docs/huggingface.md lists them."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="pip install 'subquad[hf]'")

import transformers as hf

import subquad.interop.huggingface as ours
from subquad.interop.huggingface import SubquadConfig
from subquad.interop.huggingface.text_model import SubquadTextModel
from subquad.models.base import MODELS
from tests.interop.huggingface_cases import CASES, PAD, VOCAB, Case

every = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
every_at_night = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name == "causal" else pytest.mark.nightly)
        for name, case in CASES.items()
    ],
)
with_tokens = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in CASES.items() if case.reads_tokens]
)
classifiers = pytest.mark.parametrize(
    "case", [pytest.param(CASES[name], id=name) for name in ("text classifier", "vision", "pyramid")]
)
generators = pytest.mark.parametrize(
    "case", [pytest.param(CASES[name], id=name) for name in ("causal", "seq2seq", "seq2seq, shared")]
)


WHICH = {"all": every, "all, at night": every_at_night, "tokens": with_tokens, "classes": classifiers}
WHICH |= {"generate": generators}
"""How docs/huggingface.md calls the models that a demand is for."""


def logits(model: Any, given: dict[str, Tensor], **more: Any) -> Tensor:
    with torch.no_grad():
        return model(**given, **more).logits


def hidden_states(output: Any) -> dict[str, tuple[Tensor, ...]]:
    """By the name of the output's field."""
    return {name: value for name, value in output.items() if name.endswith("hidden_states")}


# ---------------------------------------------------------------------- saving, loading, configs


@every
def test_saving_and_loading(case: Case, tmp_path: Path) -> None:
    """A model that is saved and loaded gives the same bits, also from shards, in eval mode and without a draw."""
    model, given = case.model(), case.inputs()
    expected = logits(model, given)
    for name, options in {"whole": {}, "shards": {"max_shard_size": "10KB"}}.items():
        model.save_pretrained(tmp_path / name, **options)
        before = torch.get_rng_state()
        loaded = case.auto.from_pretrained(tmp_path / name)
        assert type(loaded) is type(model)
        assert not loaded.training
        assert torch.equal(logits(loaded, given), expected)
        assert torch.equal(torch.get_rng_state(), before)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert loaded.num_parameters() == model.model.parameter_count()


@every
def test_config_round_trip(case: Case, tmp_path: Path) -> None:
    """A config survives JSON, copying and a folder, and has the fields that tools read."""
    config = case.model().config
    config.save_pretrained(tmp_path)
    again = (
        SubquadConfig.from_pretrained(tmp_path),
        SubquadConfig.from_dict(config.to_dict()),
        copy.deepcopy(config),
        hf.AutoConfig.from_pretrained(tmp_path),
    )
    assert all(one.to_diff_dict() == config.to_diff_dict() for one in again)
    assert (config.hidden_size, config.num_attention_heads) == (16, 2)
    assert config.num_hidden_layers == (3 if case is CASES["pyramid"] else 2)
    assert config.vocab_size == (VOCAB if case.reads_tokens else None)
    if not isinstance(case.model(), SubquadTextModel):
        assert config.num_labels == 3


@every
def test_a_config_builds_a_new_model(case: Case) -> None:
    """`from_config` gives a model that follows from torch's seed alone."""
    config, found = case.model().config, []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(logits(case.auto.from_config(config).eval(), case.inputs()))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@every
def test_precision_and_device(case: Case, tmp_path: Path) -> None:
    """`from_pretrained` takes dtype and device_map, `to` changes the precision, and outputs stay near."""
    model, given = case.model(), case.inputs()
    expected = logits(model, given)
    model.save_pretrained(tmp_path)
    half = case.auto.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {value.dtype for value in half.parameters()} == {torch.bfloat16}
    given_half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in given.items()}
    torch.testing.assert_close(logits(half, given_half).float(), expected, atol=0.15, rtol=0.1)
    automatic = case.auto.from_pretrained(tmp_path, dtype="auto", device_map="auto")
    assert automatic.dtype == torch.float32
    assert torch.equal(logits(automatic, given), expected)
    double = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    torch.testing.assert_close(logits(model.to(torch.float64), double).float(), expected, atol=1e-5, rtol=1e-4)


@classifiers
def test_a_head_of_another_size(case: Case, tmp_path: Path) -> None:
    """With num_labels and ignore_mismatched_sizes the head is new, as in a new model, and all else is loaded."""
    model = case.model()
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        case.auto.from_pretrained(tmp_path, num_labels=5)
    torch.manual_seed(3)
    found = case.auto.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    torch.manual_seed(3)
    new = case.auto.from_config(found.config)
    assert logits(found, {**case.inputs(), "labels": torch.tensor([4, 4, 4])}).shape == (3, 5)
    for name, value in found.named_parameters():
        expected = new if name.startswith("model.head") else model
        assert torch.equal(value, expected.get_parameter(name)), name
    found.save_pretrained(tmp_path / "again")
    assert case.auto.from_pretrained(tmp_path / "again").config.subquad["num_classes"] == 5


# ---------------------------------------------------------------------- outputs


@every
def test_arguments(case: Case) -> None:
    """`forward` names what the ecosystem passes, the main input first."""
    model = case.model()
    names = list(inspect.signature(model.forward).parameters)
    assert names[0] == model.main_input_name
    common = {"labels", "output_attentions", "output_hidden_states", "return_dict"}
    tokens = {"attention_mask", "inputs_embeds"} if case.reads_tokens else set()
    caches = {"past_key_values", "use_cache", "cache_position"} if model.can_generate() else set()
    decoder = {"decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "encoder_outputs"}
    assert common | tokens | caches | (decoder if model.config.is_encoder_decoder else set()) <= set(names)
    with pytest.raises(TypeError, match="attention_maks"):
        model(**case.inputs(), attention_maks=None)


@every
def test_outputs_repeat(case: Case) -> None:
    """Equal inputs give equal bits in eval mode."""
    model, given = case.model(), case.inputs()
    assert torch.equal(logits(model, given), logits(model, given))


@every
def test_tuples_have_the_values_of_outputs(case: Case) -> None:
    """return_dict=False, as an argument or in the config, gives the same values as a tuple."""
    model, given = case.model(), case.inputs()
    with torch.no_grad():
        whole = model(**given, output_hidden_states=True, output_attentions=True)
        values = model(**given, output_hidden_states=True, output_attentions=True, return_dict=False)
        model.config.return_dict = False
        by_config = model(**given)
    assert len(values) == len(whole.to_tuple())
    assert torch.equal(values[0], whole.loss)
    assert torch.equal(values[1], whole.logits)
    assert isinstance(by_config, tuple)


@every
def test_hidden_states(case: Case) -> None:
    """Hidden states are the input of the blocks and their outputs, by argument or config; attentions are None."""
    model, given = case.model(), case.inputs()
    plain = model(**given)
    assert not hidden_states(plain)
    output = model(**given, output_hidden_states=True, output_attentions=True)
    assert torch.equal(output.logits, plain.logits)
    assert not any(name.endswith("attentions") for name in output)
    found = hidden_states(output)
    names = {"encoder_hidden_states", "decoder_hidden_states"} if model.config.is_encoder_decoder else {"hidden_states"}
    assert found.keys() == names
    stages = 2 if case is CASES["pyramid"] else 1
    for states in found.values():
        assert len(states) == model.config.num_hidden_layers + stages
        assert all(state.shape[0] == 3 and state.shape[-1] == 16 for state in states)
    last = next(iter(found.values()))[-1]
    if model.config.is_encoder_decoder:
        assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    elif case is CASES["causal"]:
        assert torch.equal(model.model.head(last), output.logits)
    elif not case.reads_tokens:
        assert torch.equal(model.model.head(last.mean(1)), output.logits)
    assert all(len(set(map(id, states))) == len(states) for states in found.values())
    model.config.output_hidden_states = True
    assert hidden_states(model(**given)).keys() == names


@with_tokens
def test_hidden_states_of_a_row_are_those_without_padding(case: Case) -> None:
    """Padding moves nothing: hidden states are at the positions of their tokens."""
    model, given = case.model(), case.inputs()
    together = model(**given, output_hidden_states=True)
    name = "encoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states"
    for row, mask in enumerate(given["attention_mask"].bool()):
        alone = {"input_ids": given["input_ids"][row, mask][None], "output_hidden_states": True}
        if model.config.is_encoder_decoder:
            alone["labels"] = given["labels"][row : row + 1]
        for found, expected in zip(together[name], model(**alone)[name], strict=True):
            torch.testing.assert_close(found[row, mask], expected[0], atol=1e-5, rtol=1e-4)


@every
def test_gradients_reach_hidden_states(case: Case) -> None:
    """A loss has gradients with respect to the hidden states of a batch without padding."""
    model, given = case.model(), case.inputs()
    given.pop("attention_mask", None)
    output = model(**given, output_hidden_states=True)
    states = [state for found in hidden_states(output).values() for state in found]
    for state in states:
        state.retain_grad()
    output.loss.backward()
    assert all(state.grad is not None and state.grad.abs().sum() > 0 for state in states)


@every
def test_a_batch_gives_what_its_rows_give(case: Case) -> None:
    """A padded batch has the logits of its rows alone."""
    model, given = case.model(), case.inputs()
    together = logits(model, given)
    for row in range(3):
        one = {name: value[row : row + 1] for name, value in given.items()}
        mask: Any = slice(None)
        if "attention_mask" in one:
            mask = one.pop("attention_mask")[0].bool()
            one["input_ids"] = one["input_ids"][:, mask]
            if together.ndim == 3 and not model.config.is_encoder_decoder:
                one["labels"] = one["labels"][:, mask]
        expected, found = logits(model, one)[0], together[row]
        found = found[mask] if together.ndim == 3 and not model.config.is_encoder_decoder else found
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@with_tokens
def test_positions_follow_from_the_mask(case: Case) -> None:
    """Right positions may be given, and wrong ones are refused instead of ignored; so are masks that say more."""
    model, given = case.model(), case.inputs()
    expected = logits(model, given)
    names = inspect.signature(model.forward).parameters
    if "position_ids" in names:
        right = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        assert torch.equal(logits(model, given, position_ids=right), expected)
        with pytest.raises(ValueError, match="position_ids differ"):
            model(**given, position_ids=right + 1)
    if "cache_position" in names:
        time = given["labels" if model.config.is_encoder_decoder else "input_ids"].shape[1]
        assert torch.equal(logits(model, given, cache_position=torch.arange(time)), expected)
        with pytest.raises(ValueError, match="cache_position must count from 0"):
            model(**given, cache_position=torch.arange(time) + 1)
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(**given | {"attention_mask": torch.ones(3, 1, 8, 8)})


# ---------------------------------------------------------------------- embeddings


@with_tokens
def test_vectors_take_the_place_of_tokens(case: Case) -> None:
    """inputs_embeds = get_input_embeddings()(input_ids) gives the same bits; both at once are refused."""
    model, given = case.model(), case.inputs()
    expected, tokens = logits(model, given), given.pop("input_ids")
    vectors = model.get_input_embeddings()(tokens)
    assert torch.equal(logits(model, given, inputs_embeds=vectors), expected)
    if model.config.is_encoder_decoder:
        target = model.prepare_decoder_input_ids_from_labels(given["labels"])
        decoder = {"decoder_inputs_embeds": model.model.target.table(target)}
        assert torch.equal(logits(model, given, inputs_embeds=vectors, **decoder), expected)
    with pytest.raises(ValueError, match="not both"):
        model(**given, input_ids=tokens, inputs_embeds=vectors)
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds"):
        model(**given)


@with_tokens
def test_embeddings_are_read_and_replaced(case: Case) -> None:
    """get and set of input and output embeddings; what was tied stays tied."""
    model, given = case.model(), case.inputs()
    old, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(old, nn.Embedding)
    assert (head is None) == (case is CASES["text classifier"])
    if head is not None:
        assert any(module is head for module in model.modules()), "tools look for it by identity"
        assert head.weight.shape == (model.config.vocab_size, 16)
        assert (head.weight is old.weight) == (case not in (CASES["causal, untied"], CASES["seq2seq"]))
    new = nn.Embedding(*old.weight.shape)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert not torch.equal(logits(model, given), logits(case.model(), given))
    if head is not None and case not in (CASES["causal, untied"], CASES["seq2seq"]):
        assert model.get_output_embeddings().weight is new.weight
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        model.set_input_embeddings(nn.Embedding(5, 16))
    if case is CASES["causal, untied"]:
        linear = nn.Linear(16, VOCAB, bias=False)
        model.set_output_embeddings(linear)
        assert torch.equal(model.get_output_embeddings().weight, linear.weight)
    elif head is not None and head.weight is new.weight:
        with pytest.raises(ValueError, match="tied to the input embeddings"):
            model.set_output_embeddings(nn.Linear(16, VOCAB, bias=head.bias is not None))


@with_tokens
@pytest.mark.parametrize("mean", [True, False])
def test_embeddings_are_resized(case: Case, mean: bool, tmp_path: Path) -> None:
    """resize_token_embeddings keeps what was there, goes into the config, and is saved and loaded."""
    model, given = case.model(), case.inputs()
    expected, size = logits(model, given), model.get_input_embeddings().num_embeddings
    table = model.resize_token_embeddings(size + 2, pad_to_multiple_of=8, mean_resizing=mean)
    new = -(-(size + 2) // 8) * 8
    assert table is model.get_input_embeddings()
    assert table.weight.shape[0] == table.num_embeddings == new
    found = logits(model, given)
    if model.config.is_encoder_decoder and not model.model.config.shared_embedding:
        assert torch.equal(found, expected), "the target has tokens of its own"
        model.resize_decoder_token_embeddings(VOCAB + 4)
        found = logits(model, given)
    if found.ndim == 3:
        assert found.shape[-1] == model.config.vocab_size == model.get_output_embeddings().weight.shape[0]
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, atol=1e-6, rtol=1e-6)
    changed = given["input_ids"].clone()
    changed[:, -1] = new - 1
    assert logits(model, given | {"input_ids": changed}).isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(case.auto.from_pretrained(tmp_path), given), found)
    model.resize_token_embeddings(size)
    assert model.get_input_embeddings().weight.shape[0] == size
    torch.testing.assert_close(logits(model, given)[..., : expected.shape[-1]], expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="padding token"):
        model.resize_token_embeddings(PAD)
    model.tie_weights()


@with_tokens
def test_tied_weights_are_stored_once(case: Case, tmp_path: Path) -> None:
    """A table that several parts use is one parameter, is stored once, and changes for all of them."""
    model, given = case.model(), case.inputs()
    tied = case in (CASES["causal"], CASES["seq2seq, shared"], CASES["masked"])
    is_classifier = "num_classes" in model.config.subquad
    assert model.config.tie_word_embeddings == tied
    names = [name for name, _ in model.named_parameters()]
    tables = [name for name in names if "tokens.weight" in name or (name == "model.head.weight" and not is_classifier)]
    assert len(tables) == (2 if case in (CASES["causal, untied"], CASES["seq2seq"]) else 1)
    model.save_pretrained(tmp_path)
    loaded = case.auto.from_pretrained(tmp_path)
    if tied:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        with torch.no_grad():
            loaded.get_input_embeddings().weight.mul_(1.1)
        assert not torch.equal(logits(loaded, given), logits(model, given))
        with pytest.raises(ValueError, match="tie_word_embeddings cannot become False"):
            case.auto.from_pretrained(tmp_path, tie_word_embeddings=False)


# ---------------------------------------------------------------------- training


@every
def test_gradients_reach_every_parameter(case: Case) -> None:
    """The loss of a batch has a gradient for every parameter."""
    model = case.model().train()
    model(**case.inputs()).loss.backward()
    missing = [name for name, value in model.named_parameters() if value.grad is None]
    assert not missing


@every
def test_gradient_checkpointing(case: Case) -> None:
    """Checkpointing gives the same gradients, is turned on and off, and leaves hidden states as they are."""
    model, given = case.model().train(), case.inputs()
    found: list[dict[str, Tensor]] = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing is enabled
        model.zero_grad()
        torch.manual_seed(4)
        output = model(**given, output_hidden_states=True)
        output.loss.backward()
        found.append({name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None})
        assert all(len(states) >= 3 for states in hidden_states(output).values())
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], msg=name)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@every_at_night
def test_trainer(case: Case, tmp_path: Path) -> None:
    """The Trainer lowers the loss, evaluates, saves, and goes on from its checkpoint to where one training leads."""
    pytest.importorskip("accelerate")
    given = case.inputs()
    samples = [{name: value[row] for name, value in given.items()} for row in range(3)]
    common: dict[str, Any] = {"per_device_train_batch_size": 3, "learning_rate": 3e-3, "use_cpu": True, "report_to": []}
    common |= {"save_steps": 2, "logging_steps": 1, "disable_tqdm": True, "lr_scheduler_type": "constant"}

    def trainer(model: Any) -> hf.Trainer:
        options = hf.TrainingArguments(str(tmp_path), max_steps=4, **common)
        return hf.Trainer(model, options, train_dataset=samples, eval_dataset=samples)

    once = trainer(case.model())
    before = once.evaluate()["eval_loss"]
    once.train()
    assert once.evaluate()["eval_loss"] < before
    again = trainer(case.auto.from_pretrained(tmp_path / "checkpoint-2"))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert isinstance(again.model, nn.Module)
    assert isinstance(once.model, nn.Module)
    for name, value in again.model.named_parameters():
        assert torch.equal(value, once.model.get_parameter(name)), name


@classifiers
def test_labels_of_classes(case: Case) -> None:
    """Labels are class numbers or probabilities; a config that asks for another loss is refused."""
    model, given = case.model(), case.inputs()
    shares = nn.functional.one_hot(given["labels"], 3).float()
    torch.testing.assert_close(model(**given).loss, model(**given | {"labels": shares}).loss)
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="multi_label_classification"):
        model(**given | {"labels": shares})


# ---------------------------------------------------------------------- generation


@generators
def test_generate(case: Case) -> None:
    """Greedy decoding, beams and samples give as many tokens as asked for; vectors can be the prompt."""
    model, given = case.model(), case.inputs()
    given.pop("labels")
    new = {"max_new_tokens": 5, "min_new_tokens": 5}
    greedy = model.generate(**given, **new, return_dict_in_generate=True, output_hidden_states=True)
    prompt = 1 if model.config.is_encoder_decoder else given["input_ids"].shape[1]
    assert greedy.sequences.shape == (3, prompt + 5)
    steps = greedy.decoder_hidden_states if model.config.is_encoder_decoder else greedy.hidden_states
    assert len(steps) == 5
    assert all(len(states) == 3 for states in steps)
    assert steps[1][0].shape == (3, 1, 16), "the cache holds what was read before"
    assert model.generate(**given, **new, num_beams=3, num_return_sequences=2).shape[0] == 6
    assert model.generate(**given, **new, do_sample=True).shape == greedy.sequences.shape
    vectors = model.get_input_embeddings()(given.pop("input_ids"))
    from_vectors = model.generate(**given, inputs_embeds=vectors, **new)
    assert torch.equal(from_vectors[:, -5:], greedy.sequences[:, -5:])


def test_every_class_has_its_case() -> None:
    """A class that transformers can load is among the cases, and so is every kind of model."""
    held = [case.model() for case in CASES.values()]
    assert {type(one).__name__ for one in held} == {name for name in ours.__all__ if name.startswith("SubquadFor")}
    assert {one.model.config.kind for one in held} == set(MODELS)


def test_the_page_lists_the_demands() -> None:
    """The table of docs/huggingface.md has a row for each test above, with its docstring and the classes it runs on."""
    rows = []
    for name, test in globals().items():
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.args[0] == "case"]
        if name.startswith("test_") and marks:
            rows.append(f"| `{name}` | {' '.join(test.__doc__.split())} | {_which(marks[0])} |")
    assert len(rows) > 20
    assert "\n".join(rows) in (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()


def _which(mark: pytest.Mark) -> str:
    return next(name for name, chosen in WHICH.items() if chosen.mark.args[1] is mark.args[1])
