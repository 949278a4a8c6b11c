"""The net is tested too: mechanisms with one fault each fail, by the name of the property that they break."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from subquad.testing import MixerContract

pytestmark = pytest.mark.usefixtures("preloaded_programs")

FILE = Path(__file__).with_name("faulty_mixers.py")
STREAMS = {
    "test_streaming_in_chunks_equals_one_pass",
    "test_streaming_in_half_precision",
    "test_streaming_under_autocast",
}
LOWER = {"test_streaming_in_half_precision", "test_streaming_under_autocast"}
EXPECTED = {
    "intact": set(),
    "intact_causal_only": set(),
    "padding_leaks": {"test_padding_changes_nothing"},
    "company_matters": {"test_company_in_the_batch_changes_nothing"},
    "padded_cell_counts": {
        "test_padded_cells_of_a_grid_contribute_nothing",
        "test_equal_tokens_of_a_grid_come_back_equal",
    },
    "not_finite": {
        "test_padded_rows_and_short_lengths_are_finite",
        "test_gradients_in_float64",
        "test_gradients_in_float32_agree_with_float64",
    },
    "needs_a_row": {"test_empty_batches"},
    "looks_ahead": {
        "test_the_future_never_reaches_the_past",
        "test_a_prefix_has_the_outputs_of_the_whole",
        "test_padding_changes_nothing",
    }
    | STREAMS,
    "knows_the_length": {"test_a_prefix_has_the_outputs_of_the_whole"} | STREAMS,
    "forgets_nothing": {"test_tokens_that_are_not_read_change_nothing"},
    "stream_differs": STREAMS,
    "state_cannot_be_reordered": {"test_reordering_states_equals_reordering_inputs"} | LOWER,
    "state_is_overwritten": {"test_a_state_can_be_read_more_than_once", "test_room_in_a_state_changes_nothing"},
    "foreign_states_are_read": {"test_states_of_another_mechanism_are_refused"},
    "autocast_breaks_the_stream": {"test_streaming_under_autocast"},
    "bfloat16_is_rounded": {"test_half_precision_stays_near_float32"},
    "autocast_is_rounded": {"test_autocast_stays_near_float32"},
    "wrong_gradient": {"test_gradients_in_float64"},
    "wrong_gradient_in_float32": {"test_gradients_in_float32_agree_with_float64"},
    "draws_of_its_own": {"test_gradients_in_float64"},
    "another_generator": {"test_gradients_in_float64", "test_equal_inputs_and_seeds_give_equal_bits"},
    "graph_breaks": {"test_compiles_without_graph_breaks"},
    "quadratic_memory": {"test_memory_kept_for_the_backward_pass_is_linear"},
    "context_padding_leaks": {"test_padding_of_a_context_changes_nothing"},
    "context_cannot_be_reordered": {
        "test_a_context_is_read_once_and_kept",
        "test_cross_attention_in_lower_precision",
    },
}
Outcomes = dict[str, dict[str, set[str]]]
"""From mechanism to "passed", "failure" or "error" to the names of the tests that did so."""
PROPERTIES = {name for name in dir(MixerContract) if name.startswith("test_")}
BROKEN = [f"({mechanism} and ({' or '.join(tests)}))" for mechanism, tests in sorted(EXPECTED.items()) if tests]
SELECTIONS = {
    "what is broken": " or ".join(["intact", *BROKEN]),
    "everything": "not compiles or intact or graph_breaks",  # compiling takes a second each
}


@pytest.fixture(scope="module", params=["what is broken", pytest.param("everything", marks=pytest.mark.nightly)])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Tests of every planted mechanism, from one run of pytest: those that have to fail, or all at night."""
    report = tmp_path_factory.mktemp("faults") / "report.xml"
    command = [sys.executable, "-m", "pytest", str(FILE), "--tb=no", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-k", SELECTIONS[request.param]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # some tests failed, and nothing else went wrong
    found: Outcomes = defaultdict(lambda: defaultdict(set))
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, rest = case.attrib["name"].partition("[")
        outcome = case[0].tag if len(case) else "passed"
        if outcome != "skipped":
            found[rest.partition("-")[0]][outcome].add(test)
    return found


@pytest.mark.parametrize("mechanism", EXPECTED)
def test_a_fault_fails_by_name(mechanism: str, outcomes: Outcomes) -> None:
    assert outcomes[mechanism]["failure"] | outcomes[mechanism]["error"] == EXPECTED[mechanism]


def test_a_fault_does_not_hide_other_properties(outcomes: Outcomes, request: pytest.FixtureRequest) -> None:
    """Mechanisms with a fault keep more than ten properties; those of the quick selection run none of these."""
    whole = request.node.callspec.params["outcomes"] == "everything"
    for mechanism, expected in EXPECTED.items():
        assert len(outcomes[mechanism]["passed"]) > 10 or (expected and not whole), mechanism


def test_every_planted_mechanism_is_expected(outcomes: Outcomes) -> None:
    assert set(outcomes) == set(EXPECTED)


def test_intact_mechanisms_meet_every_property(outcomes: Outcomes) -> None:
    """So no property is one that runs for nobody."""
    assert outcomes["intact"]["passed"] | outcomes["intact_causal_only"]["passed"] == PROPERTIES
