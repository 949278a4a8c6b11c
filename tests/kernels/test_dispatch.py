"""Which implementation of an operation runs, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from subquad.kernels import dispatch, numba_tools, window_attention
from subquad.kernels.chunk_values import chunk_values
from subquad.kernels.window_attention import Windows
from subquad.mixers import Mixer, available, build, mixer_class

CPU = [
    "chunk_values",
    "conv",
    "cross_entropy",
    "dropout",
    "feature_attention",
    "gathered",
    "landmark_attention",
    "linear",
    "primal_scores",
    "tokens_at",
    "vocabulary",
    "window_attention",
]
ALL_PRECISIONS = ["conv", "cross_entropy", "primal_scores", "tokens_at"]
GPU = sorted({*CPU, "scan"} - {"dropout", "gathered", "linear", "vocabulary"})
X = torch.zeros(1)


@pytest.fixture(autouse=True)
def _auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the processes that run Triton's interpreter; Triton itself has not to be there."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_import", lambda operation, kind: ModuleType(f"{operation}.{kind}"))
    monkeypatch.setattr(dispatch.importlib, "import_module", ModuleType)
    dispatch.forget()


def implementations(setting: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By operation; "" where it is refused."""
    monkeypatch.setenv(dispatch.VARIABLE, setting)
    found = {}
    for operation in dispatch.operations():
        try:
            found[operation] = dispatch.implementation(operation, x)
        except ValueError:
            found[operation] = ""
    return found


def test_every_folder_with_a_reference_is_an_operation() -> None:
    assert dispatch.operations() == sorted([*CPU, "scan"])
    for operation in dispatch.operations():
        dispatch.choose(operation, X)


def test_auto_takes_the_kernels_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = implementations("auto", X, monkeypatch)
    assert [operation for operation, name in found.items() if name == "cpu"] == CPU
    assert found["scan"] == "reference"
    assert set(implementations("auto", X.to("meta"), monkeypatch).values()) == {"reference"}
    assert set(implementations("reference", X, monkeypatch).values()) == {"reference"}
    assert dispatch.problems() == []


def test_a_precision_that_a_kernel_does_not_take_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    found = implementations("auto", X.half(), monkeypatch)
    assert [operation for operation, name in found.items() if name == "cpu"] == ALL_PRECISIONS
    found = implementations("cpu", X.half(), monkeypatch)
    assert [operation for operation, name in found.items() if name == ""] == sorted({*CPU, "scan"} - {*ALL_PRECISIONS})
    with pytest.raises(ValueError, match=r"its cpu kernel does not take torch\.float16; set SUBQUAD_KERNELS=auto"):
        dispatch.choose("window_attention", X.half())


def test_a_forced_kernel_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert implementations("cpu", X, monkeypatch) == dict.fromkeys(CPU, "cpu") | {"scan": ""}
    with pytest.raises(ValueError, match="scan: SUBQUAD_KERNELS=cpu is not possible: it has no cpu kernel"):
        dispatch.choose("scan", X)


@pytest.mark.usefixtures("interpreted")
def test_a_forced_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = implementations("gpu", X, monkeypatch)
    assert found == dict.fromkeys(CPU, "") | dict.fromkeys(GPU, "gpu")


def test_whether_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.has_kernel("dropout", X)
    assert not dispatch.has_kernel("dropout", X.half())
    assert not dispatch.has_kernel("dropout", X.to("meta"))
    for setting in ("reference", "gpu"):
        monkeypatch.setenv(dispatch.VARIABLE, setting)
        assert not dispatch.has_kernel("dropout", X)


def test_a_case_that_a_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.implementation("window_attention", X, "grids") == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "cpu")
    with pytest.raises(ValueError, match=r"window_attention: .* its cpu kernel does not take grids"):
        dispatch.implementation("window_attention", X, "grids")


@pytest.mark.parametrize("operation", dispatch.operations())
@pytest.mark.parametrize(
    ("setting", "device", "message"),
    [
        ("nonsense", "cpu", "SUBQUAD_KERNELS=nonsense is unknown; it takes auto, reference, cpu or gpu"),
        ("gpu", "cpu", "SUBQUAD_KERNELS=gpu cannot work on a tensor on cpu; set SUBQUAD_KERNELS=auto"),
        ("cpu", "meta", "SUBQUAD_KERNELS=cpu cannot work on a tensor on meta; set SUBQUAD_KERNELS=auto"),
    ],
)
def test_wrong_settings_are_refused_by_every_operation(
    operation: str, setting: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, setting)
    with pytest.raises(ValueError, match=f"{operation}: {message}"):
        dispatch.choose(operation, X.to(device))


def mixer_of(name: str, causal: bool) -> Mixer:
    abilities = mixer_class(name).capabilities
    if not (abilities.causal if causal else abilities.bidirectional):
        pytest.skip(f"{name} has no such form")
    return build(name, dim=16, heads=2, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("setting", ["nonsense", "gpu"])
@pytest.mark.parametrize("name", available())
def test_wrong_settings_are_refused_by_every_mechanism(
    name: str, setting: str, training: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer = mixer_of(name, causal).train(training)
    mixer(torch.zeros(2, 7, 16))
    monkeypatch.setenv(dispatch.VARIABLE, setting)
    with pytest.raises(ValueError, match=f"{name}: SUBQUAD_KERNELS={setting} .*auto"):
        mixer(torch.zeros(2, 7, 16))
    if mixer.can_stream:
        with pytest.raises(ValueError, match=f"{name}: SUBQUAD_KERNELS={setting} .*auto"):
            mixer.init_state(2)


def test_adding_a_kernel_is_adding_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu.py").write_text("def window_attention(qkv, *others):\n    return qkv[:, :, 0] + 5\n")
    monkeypatch.setattr(window_attention, "__path__", [str(tmp_path), *window_attention.__path__])
    monkeypatch.setenv(dispatch.VARIABLE, "gpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "subquad.kernels.window_attention.gpu", raising=False)
    dispatch.forget()
    try:
        y = window_attention.window_attention(torch.ones(1, 4, 3, 2, 3), Windows((4,), 2))
        assert y.eq(6).all()
        assert y.shape == (1, 4, 2, 3)
    finally:
        dispatch.forget()
        sys.modules.pop("subquad.kernels.window_attention.gpu", None)
        vars(window_attention).pop("gpu", None)


def test_compiled_code_has_the_choice_of_its_compilation() -> None:
    def square(qkv: Tensor) -> Tensor:
        return window_attention.window_attention(qkv, Windows((4,), 2)).square()

    torch._dynamo.reset()
    compiled = torch.compile(square, backend="eager", fullgraph=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        qkv = torch.randn(1, 4, 3, 2, 3, dtype=dtype)
        torch.testing.assert_close(compiled(qkv), square(qkv))
    torch._dynamo.reset()


def test_no_folder_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(function, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return function

    monkeypatch.setattr(numba_tools.numba, "njit", njit)
    assert numba_tools.compiled(mixer_of) is mixer_of  # type: ignore[arg-type]


# ---------------------------------------------------------------------- processes of their own


def run_in_a_process_of_its_own(program: str, **environment: str) -> None:
    head = (
        "import sys, torch\n"
        "from subquad.kernels import conv, dispatch\n"
        "x, taps = torch.ones(2, 5, 4), torch.ones(2, 3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + program], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_reference_by_force() -> None:
    run_in_a_process_of_its_own(
        "y = conv.tap_conv(x.requires_grad_(), taps, 2)\n"
        "assert y[0, :, 0].tolist() == [1, 2, 3, 3, 3]\n"
        "y.sum().backward()\n"
        "assert x.grad[0, :, 0].tolist() == [3, 3, 3, 2, 1]\n"
        "assert 'numba' not in sys.modules\n",
        SUBQUAD_KERNELS="reference",
    )


def test_without_numba() -> None:
    run_in_a_process_of_its_own(
        "import os\n"
        "sys.modules['numba'] = None\n"
        "assert conv.tap_conv(x, taps, 2)[0, :, 0].tolist() == [1, 2, 3, 3, 3]\n"
        "(problem,) = dispatch.problems()\n"
        "assert problem.startswith('conv, cross_entropy, dropout, gathered, linear, vocabulary: '), problem\n"
        "assert 'pip install numba' in problem, problem\n"
        "assert 'plain torch is used instead' in problem, problem\n"
        "os.environ['SUBQUAD_KERNELS'] = 'cpu'\n"
        "try:\n"
        "    conv.tap_conv(x, taps, 2)\n"
        "except ValueError as error:\n"
        "    assert 'conv' in str(error) and 'pip install numba' in str(error)\n"
        "else:\n"
        "    raise AssertionError('the forced kernels were not missed')\n",
        SUBQUAD_KERNELS="auto",
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_takes_the_reference() -> None:
    run_in_a_process_of_its_own(
        "import os\n"
        "y = conv.tap_conv(x, taps, 2)\n"
        "assert dispatch.implementation('conv', x) == 'cpu'\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    right = torch.equal(conv.tap_conv(x, taps, 2), y) and 'forked' in dispatch.problems()[0]\n"
        "    right = right and dispatch.implementation('conv', x) == 'reference'\n"
        "    os._exit(0 if right else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n",
        SUBQUAD_KERNELS="auto",
        OMP_NUM_THREADS="1",
    )


def test_a_graph_may_be_the_first_to_use_two_operations() -> None:
    """As in a process that compiles before it has run anything: both are chosen while the graph is made."""
    qkv, w = torch.randn(2, 8, 3, 2, 4), torch.randn(2, 2, 4, 4)

    def both(qkv: Tensor, w: Tensor) -> Tensor:
        y = window_attention.window_attention(qkv, Windows((8,), 4))
        return y.sum() + chunk_values(qkv, w, None, 2)[1].sum()

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_modules", SimpleNamespace())
        dispatch.forget()
        found = torch.compile(both, backend="eager", fullgraph=True)(qkv, w)
    dispatch.forget()
    torch._dynamo.reset()
    torch.testing.assert_close(found, both(qkv, w))
