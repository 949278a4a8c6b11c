"""torch.compile: one graph without breaks, with padding."""

import torch

from subquad.testing.cases import Case
from subquad.testing.inputs import assert_close
from subquad.testing.selection import for_cases


def is_first(case: Case) -> bool:
    """Tracing takes a second or more, so that the first option set of each form stands for all."""
    return case.is_first


class CompileContract:
    @for_cases(is_first)
    def test_compiles_without_graph_breaks(self, case: Case) -> None:
        mixer = case.build()
        x, padding = case.tokens(2, 41), torch.arange(41) >= torch.tensor([[41], [30]])
        torch._dynamo.reset()
        try:
            compiled = torch.compile(mixer, backend="eager", fullgraph=True)
            assert_close(compiled(x, padding=padding).y, mixer(x, padding=padding).y, "41 positions, 11 of them padded")
        finally:
            torch._dynamo.reset()
