"""What a mechanism cannot do is refused aloud: a ValueError that names it and says what is wrong."""

import pytest
import torch

from subquad.testing.cases import Case, reads_context, streams
from subquad.testing.selection import for_cases


def reads_no_context(case: Case) -> bool:
    return not reads_context(case)


def streams_nothing(case: Case) -> bool:
    return not streams(case)


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

    @for_cases(reads_no_context)
    def test_a_context_is_refused(self, case: Case) -> None:
        with pytest.raises(ValueError, match=rf"{case.name}.*(context|cross).*softmax"):
            case.build()(case.tokens(2, 5), context=case.tokens(2, 7))

    @for_cases(streams_nothing)
    def test_streaming_is_refused(self, case: Case) -> None:
        mixer = case.build()
        with pytest.raises(ValueError, match=rf"{case.name}.*lightconv"):
            mixer(case.tokens(2, 5), state=mixer.init_state(2))

    @for_cases()
    def test_unknown_options_are_refused(self, case: Case) -> None:
        with pytest.raises(ValueError, match=rf"{case.name} has no option 'haeds'; did you mean 'heads'\?"):
            case.build(haeds=2)

    @for_cases()
    def test_options_are_frozen_and_rebuild_their_mixer(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(1, 5)
        with pytest.raises(ValueError, match="frozen"):
            mixer.config.dim = 8
        again = type(mixer)(mixer.Config.model_validate_json(mixer.config.model_dump_json())).eval()
        again.load_state_dict(mixer.state_dict())
        assert again.config == mixer.config
        assert torch.equal(again(x).y, mixer(x).y)
