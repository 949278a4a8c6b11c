"""What a mechanism cannot do is refused aloud: a ValueError that names it, says what is wrong, and who can do it."""

from collections.abc import Iterator

import pytest
import torch

from subquad.mixers import State, available, mixer_class
from subquad.testing.cases import Case, cases, first_case, has_parameters, reads_context, streams
from subquad.testing.selection import for_cases


def reads_no_context(case: Case) -> bool:
    return not reads_context(case)


def streams_nothing(case: Case) -> bool:
    return not streams(case)


def has_one_form(case: Case) -> bool:
    has = mixer_class(case.name).capabilities
    return not (has.causal and has.bidirectional)


class RefusalContract:
    @for_cases()
    def test_wrong_shapes_are_refused(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(2, 6)
        for wrong in (x[0], x[..., :-1], x[None]):
            with pytest.raises(ValueError, match=rf"{case.name}: x must be \(batch, time, {case.dim}\), got"):
                mixer(wrong)
        for call, message in (
            ({"padding": torch.zeros(2, 5, dtype=torch.bool)}, r"padding of x must be \(2, 6\)"),
            ({"padding": torch.zeros(2, 6)}, "must be bool"),
            ({"grid": (2, 2)}, r"grid \(2, 2\) has 4 cells, x has 6 tokens"),
            ({"context_padding": torch.zeros(2, 6, dtype=torch.bool)}, "without a context"),
        ):
            with pytest.raises(ValueError, match=f"{case.name}: .*{message}"):
                mixer(x, **call)
        with pytest.raises(ValueError, match=f"{case.name}: .*empty sequence"):
            mixer(x[:, :0])

    @for_cases(has_parameters)
    def test_inputs_of_another_precision_are_refused(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(2, 6)
        for wrong in (torch.float64, torch.bfloat16, torch.int64):
            with pytest.raises(ValueError, match=f"{case.name}: x is {wrong}, the parameters are torch.float32"):
                mixer(x.to(wrong))
        with torch.autocast("cpu", torch.bfloat16):  # which converts them itself
            assert mixer(x.bfloat16()).y.isfinite().all()

    @for_cases()
    def test_unknown_options_are_refused(self, case: Case) -> None:
        with pytest.raises(ValueError, match=rf"{case.name} has no option 'haeds'; did you mean 'heads'\?"):
            case.build(haeds=2)

    @for_cases(has_one_form)
    def test_the_form_it_lacks_is_refused(self, case: Case) -> None:
        with pytest.raises(ValueError, match=f"{case.name} cannot .*softmax"):
            case.build(causal=not case.causal)

    @for_cases(reads_no_context)
    def test_a_context_is_refused(self, case: Case) -> None:
        with pytest.raises(ValueError, match=rf"{case.name}.*context.*softmax.*linformer"):
            case.build()(case.tokens(2, 5), context=case.tokens(2, 7))

    @for_cases(streams_nothing)
    def test_streaming_is_refused(self, case: Case) -> None:
        mixer = case.build()
        with pytest.raises(ValueError, match=rf"{case.name}.*(stream|causal|length to come).*lightconv"):
            mixer(case.tokens(2, 5), state=mixer.init_state(2))

    @for_cases(streams)
    def test_states_of_another_batch_are_refused(self, case: Case) -> None:
        mixer = case.build()
        with pytest.raises(ValueError, match=f"{case.name}: the state holds 3 rows, x has 2"):
            mixer(case.tokens(2, 6), state=mixer.init_state(3))
        with pytest.raises(ValueError, match="at least 1"):
            mixer.init_state(0)

    @for_cases(streams)
    def test_states_of_another_mechanism_are_refused(self, case: Case) -> None:
        """It is known by the attribute `state_type` of the class."""
        mixer, x = case.build(), case.tokens(2, 6)
        for state in other_states(type(mixer.init_state(2))):
            with pytest.raises(ValueError, match=f"{case.name}: the state is a {type(state).__name__}, which belongs"):
                mixer(x, state=state)

    @for_cases(reads_context)
    def test_contexts_of_another_mechanism_are_refused(self, case: Case) -> None:
        """It is known by the attribute `context_type` of the class."""
        mixer, x = case.build(), case.tokens(2, 6)
        own = type(mixer(x, context=x, state=mixer.init_state(2)).state)
        for name in ("softmax", "linformer"):
            other = first_case(name)
            reader, y = other.build(), other.tokens(2, 6)
            state = reader(y, context=y, state=reader.init_state(2)).state
            if type(state) is not own:
                with pytest.raises(ValueError, match=f"{case.name}: the state is a {type(state).__name__}"):
                    mixer(x, state=state)

    @for_cases()
    def test_options_are_frozen_and_rebuild_their_mixer(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(1, 5)
        with pytest.raises(ValueError, match="frozen"):
            mixer.config.dim = 8
        again = type(mixer)(mixer.Config.model_validate_json(mixer.config.model_dump_json())).eval()
        again.load_state_dict(mixer.state_dict())
        assert again.config == mixer.config
        assert torch.equal(again(x).y, mixer(x).y)


def other_states(own: type[State]) -> Iterator[State]:
    """A state of every type but one that registered mechanisms have, for two rows."""
    for name in available():
        streaming = [case for case in cases(name) if streams(case)]
        state = streaming[0].build().init_state(2) if streaming else None
        if state is not None and type(state) is not own:
            yield state
