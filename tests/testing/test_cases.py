"""Which cases there are: all forms and option sets, each with a name."""

from typing import Any

import pytest

from subquad.mixers import Capabilities, Mixer, MixerConfig, available, mixer_class, registry
from subquad.testing import cases, contract, every_case


def test_every_mechanism_has_cases_of_every_form_and_example() -> None:
    for name in available():
        has, found = mixer_class(name).capabilities, cases(name)
        assert {case.causal for case in found} == {
            causal for causal in (False, True) if (has.bidirectional, has.causal)[causal]
        }
        assert {case.options for case in found} == {tuple(options.items()) for options in mixer_class(name).examples}


def test_names_of_cases_tell_them_apart_and_can_be_selected() -> None:
    names = [str(case) for case in every_case()]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").replace("_", "").replace(".", "").isalnum() for name in names)


class Windowed(Mixer[MixerConfig]):
    """Refuses whatever is causal, though its capabilities say otherwise."""

    capabilities = Capabilities(causal=True, cross=False, grid=False, state="none")

    def setup(self) -> None:
        if self.config.causal:
            raise ValueError("not today")


def test_a_form_that_no_example_can_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = dict(registry._REGISTRY)
    monkeypatch.setattr(registry, "_REGISTRY", known)
    registry.register("windowed")(Windowed)
    with pytest.raises(ValueError, match=r"no example of windowed .* windowed-causal-defaults is refused: not today"):
        cases("windowed")


def test_the_contract_needs_names_of_mechanisms() -> None:
    with pytest.raises(ValueError, match="at least one mechanism"):
        contract()
    with pytest.raises(ValueError, match=r"did you mean 'softmax'\?"):
        contract("softmx")
