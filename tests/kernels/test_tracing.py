"""What the code knows about torch.compile and torch.export, and that it asks in one module only."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import subquad
from subquad.kernels import tracing

PACKAGE = Path(subquad.__file__).parent
QUESTION = re.compile(r"torch\.compiler|_dynamo_marked|is_(dynamo_)?(compiling|exporting)\(")
ASKED = re.compile(r"tracing\.is_exporting\(")


def questions(text: str) -> list[str]:
    """Lines of a source text that ask torch itself whether it compiles or exports."""
    return [line.strip() for line in text.splitlines() if QUESTION.search(ASKED.sub("", line))]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_this_module_asks_torch(path: Path) -> None:
    if path != Path(tracing.__file__):
        assert not questions(path.read_text()), f"{path.relative_to(PACKAGE)}: ask subquad.kernels.tracing instead"


@pytest.mark.parametrize(
    "line",
    [
        "if torch.compiler.is_compiling():",
        "from torch.compiler import is_exporting",
        "return torch._dynamo.is_compiling()",
        "function._dynamo_marked_constant = True",
        "from torch import compiler; compiler.is_dynamo_compiling()",
    ],
)
def test_a_question_is_found(line: str) -> None:
    assert questions(f"x = 1\n{line}\n") == [line]


class Answers(nn.Module):
    """Adds powers of two for what is true while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        answers = [
            tracing.is_tracing(),
            tracing.is_exporting(),
            tracing.is_symbolic(x.shape[0]),
            tracing.may_branch_on_length(),
            tracing.may_read_values(x),
            tracing.may_call_directly(x),
        ]
        return x + sum(2**i for i, answer in enumerate(answers) if answer)


def found(answer: Tensor) -> list[int]:
    return [i for i in range(6) if int(answer[0]) >> i & 1]


def test_the_answers() -> None:
    module, x = Answers(), torch.zeros(3)
    assert found(module(x)) == [3, 4, 5]
    assert found(torch.compile(module, backend="eager", fullgraph=True, dynamic=True)(x)) == [0]
    fixed = torch.export.export(module, (x,)).module()
    assert found(fixed(x)) == [0, 1, 5]
    free = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=9)},)).module()
    assert found(free(x)) == [0, 1, 2, 5]


def test_a_kernel_is_called_directly_only_where_nothing_looks() -> None:
    x = torch.zeros(3)
    assert tracing.may_call_directly(x, nn.Parameter(x, requires_grad=False))
    assert not tracing.may_call_directly(x, x.clone().requires_grad_())
    with torch.no_grad():
        assert tracing.may_call_directly(nn.Parameter(x))
    assert not tracing.may_call_directly(x.to("meta"))
    assert not tracing.may_read_values(x.to("meta"))
