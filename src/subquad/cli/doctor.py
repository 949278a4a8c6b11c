"""`subquad doctor`: what this installation can do, what it lacks, and what to do about it."""

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from subquad import packages
from subquad.cli.options import AsJson
from subquad.cli.output import styled

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from torch import Tensor

KERNELS = "SUBQUAD_KERNELS"
GIBIBYTE = 2**30
LEAST_MEMORY = LEAST_DISK = 2 * GIBIBYTE
NVIDIA = Path("/dev/nvidiactl")  # there when the driver is loaded


@dataclass
class Finding:
    """One line of the report. "broken" is essential and makes the exit code 1; "note" says what could be better."""

    name: str
    status: str  # "ok", "note" or "broken"
    text: str
    remedy: str | None = None


def doctor(as_json: AsJson = False) -> None:
    """Check this installation, and say what to do about problems.

    It looks at versions, kernels, threads, allocator, memory, disk and extras, and runs a short self-test, on the CPU
    and on every GPU. The exit code is 0 unless something essential is broken. The first time, kernels are compiled,
    which takes some seconds for each; they are kept on disk.

    Examples:
    subquad doctor
    subquad doctor --json
    """
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(_line(finding), flush=True)
    broken = [finding.name for finding in findings if finding.status == "broken"]
    if as_json:
        print(json.dumps({"ok": not broken, "findings": [asdict(finding) for finding in findings]}, indent=2))
    elif not broken:
        notes = sum(finding.status == "note" for finding in findings)
        print("\nEverything essential works" + (f"; {notes} notes above say what could be better." if notes else "."))
    if broken:
        raise ValueError(f"broken: {', '.join(broken)}; see above for what to do")


def examine() -> Iterator[Finding]:
    """All findings, in order. A check that fails to run is a finding too, and ends nothing but itself."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", python),
        ("packages", needed_packages),
        ("torch", torch_itself),
        ("kernels", kernels),
        ("self-test", self_test),
        ("self-test on cuda", gpu_self_test),
        ("numba", numba_threads),
        ("triton", triton),
        ("allocator", allocator),
        ("memory", memory),
        ("disk", disk),
        ("extras", extras),
    ]
    for name, check in checks:
        try:
            yield from check()
        except ValueError as error:  # says itself what to do, as all of ours
            yield Finding(name, "broken", str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            yield Finding(name, "broken", text, "reinstall with `pip install --force-reinstall subquad`")


def _line(finding: Finding) -> str:
    mark, colour = {"ok": ("ok    ", "green"), "note": ("note  ", "yellow"), "broken": ("BROKEN", "red")}[
        finding.status
    ]
    return f"{styled(mark, sys.stdout, fg=colour)}  {finding.name}: {finding.text}" + (
        f" -> {finding.remedy}" if finding.remedy else ""
    )


# ---------------------------------------------------------------------- what is installed


def python() -> Iterator[Finding]:
    from importlib import metadata

    from packaging.specifiers import SpecifierSet

    wanted = metadata.metadata("subquad")["Requires-Python"] or ""
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        yield Finding("python", "ok", text)
    else:
        yield Finding("python", "broken", text, f"install a Python that is {wanted}")


def needed_packages() -> Iterator[Finding]:
    """What nothing works without, in versions that fit."""
    needed = packages.requirements()[None]
    wrong = [problem for one in needed if (problem := packages.find_problem(one))]
    if wrong:
        yield Finding("packages", "broken", ", ".join(wrong), "pip install --upgrade subquad")
    else:
        yield Finding("packages", "ok", f"the {len(needed)} that are needed are installed, in versions that fit")


def torch_itself() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "broken", f"cannot be imported ({error})", "pip install torch")
        return
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    text = f"{torch.__version__}, {threads} threads for {cores} cores, GPUs: {', '.join(devices) or 'none'}"
    if threads > cores:
        yield Finding("torch", "note", text, f"set OMP_NUM_THREADS={cores}: more threads than cores slow one another")
    elif threads < cores // 2:
        yield Finding("torch", "note", text, f"set OMP_NUM_THREADS={cores}, unless other processes use the cores")
    elif not devices and NVIDIA.exists():
        remedy = "install torch for CUDA (pytorch.org says how) and a driver that fits it"
        yield Finding("torch", "note", f"{text}, though the system has one", remedy)
    else:
        yield Finding("torch", "ok", text)


def kernels() -> Iterator[Finding]:
    import torch

    from subquad.kernels import dispatch

    setting = os.environ.get(KERNELS) or "auto"
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    chosen = [f"{_chosen_kernels(torch.empty(1, device=device))} on {device}" for device in devices]
    yield Finding("kernels", "ok", f"{'; '.join(chosen)} ({KERNELS}={setting})")
    for problem in dispatch.problems():
        yield Finding("kernels", "note", problem)


def _chosen_kernels(x: "Tensor") -> str:
    """Which implementation of each operation works on tensors like x."""
    from subquad.kernels import dispatch

    found: dict[str, list[str]] = {}
    dispatch.check("doctor", x.device)
    for operation in dispatch.operations():
        try:
            name = dispatch.implementation(operation, x)
        except ValueError:
            name = "none"
        found.setdefault(name, []).append(operation)
    return ", ".join(f"{name} ({' '.join(names)})" for name, names in found.items())


def numba_threads() -> Iterator[Finding]:
    """After the self-test: numba settles on a threading layer when a parallel kernel first runs."""
    if packages.installed_version("numba") is None:
        yield Finding("numba", "note", "not installed: CPU kernels run in plain torch", "pip install numba")
        return
    import numba

    text = f"{numba.__version__}, {numba.get_num_threads()} threads"
    try:
        layer = numba.threading_layer()
    except ValueError:  # no parallel kernel has run
        yield Finding("numba", "ok", f"{text}, threading layer not in use")
        return
    if layer == "omp":
        yield Finding("numba", "ok", f"{text}, threading layer omp, shared with torch")
    else:
        remedy = "set NUMBA_THREADING_LAYER=omp (Linux: needs libgomp, which torch brings)"
        yield Finding("numba", "note", f"{text}, threading layer {layer}, two to three times slower", remedy)


def triton() -> Iterator[Finding]:
    import torch

    version = packages.installed_version("triton")
    if version is not None:
        yield Finding("triton", "ok", version)
    elif torch.cuda.is_available():
        yield Finding("triton", "note", "not installed: GPU kernels run in plain torch", "pip install 'subquad[gpu]'")
    else:
        yield Finding("triton", "ok", "not installed, and no GPU that would need it")


def extras() -> Iterator[Finding]:
    """Whether the packages of each optional extra are there and can be imported, and those of models to swap into."""
    from packaging.requirements import Requirement

    named = {f"extra {extra}": needed for extra, needed in packages.requirements().items() if extra is not None}
    remedies = {f"extra {extra}": f"pip install 'subquad[{extra}]'" for extra in packages.requirements()}
    for package in ("timm", "torchvision"):
        named[package], remedies[package] = [Requirement(package)], f"pip install {package}"
    installed = [one.name for needed in named.values() for one in needed if packages.installed_version(one.name)]
    broken = packages.find_broken(*dict.fromkeys(installed))
    for name, needed in sorted(named.items()):
        yield _optional(name, needed, remedies[name], broken)


def _optional(name: str, needed: "list[Requirement]", remedy: str, broken: dict[str, str]) -> Finding:
    """installed, not installed, too old, or installed and broken."""
    wrong = {one.name: broken[one.name] for one in needed if one.name in broken}
    if wrong:
        text = ", ".join(f"{package} is installed and cannot be imported ({why})" for package, why in wrong.items())
        remedy = f"install versions that fit one another and torch, or remove them: pip uninstall {' '.join(wrong)}"
        return Finding(name, "note", f"{text} (optional)", remedy)
    problems = {one.name: problem for one in needed if (problem := packages.find_problem(one))}
    if not problems:
        return Finding(name, "ok", f"{', '.join(one.name for one in needed)} installed")
    old = [package for package in problems if packages.installed_version(package) is not None]
    text = f"{', '.join(problems.values())} (optional)"
    return Finding(name, "note", text, f"{remedy} --upgrade") if old else Finding(name, "ok", text, remedy)


# ---------------------------------------------------------------------- the machine


def allocator() -> Iterator[Finding]:
    from subquad import allocator

    if allocator.choice() == "system":
        yield Finding("allocator", "ok", f"the system's own ({allocator.VARIABLE}=system)")
    elif allocator.keep_freed_memory():
        yield Finding("allocator", "ok", "commands keep freed memory; programs: subquad.allocator.keep_freed_memory()")
    else:
        remedy = "preload jemalloc (LD_PRELOAD) if large tensors are slow" if sys.platform == "linux" else None
        yield Finding("allocator", "ok", "the system's own: its thresholds cannot be raised here", remedy)


def memory() -> Iterator[Finding]:
    available = available_memory()
    if available is None:
        yield Finding("memory", "ok", "not known on this system")
        return
    text = f"{available / GIBIBYTE:.1f} GiB available"
    if available < LEAST_MEMORY:
        yield Finding("memory", "note", text, "close other programs, or use smaller batches and lengths")
    else:
        yield Finding("memory", "ok", text)


def disk() -> Iterator[Finding]:
    """Where runs go unless --out says otherwise: the current folder."""
    folder = Path.cwd()
    text = f"{shutil.disk_usage(folder).free / GIBIBYTE:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "note", f"{folder} cannot be written", "change to another folder, or give --out")
    elif shutil.disk_usage(folder).free < LEAST_DISK:
        yield Finding(
            "disk", "note", text, "free some, or give --out on another disk: a checkpoint needs its space twice"
        )
    else:
        yield Finding("disk", "ok", text)


def available_memory(
    system: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup/memory.max")
) -> int | None:
    """Bytes that this process may still take: what the system has, or the limit of its container if that is less."""
    limits = []
    if system.exists():
        limits += [int(kib) * 1024 for kib in re.findall(r"^MemAvailable:\s+(\d+) kB$", system.read_text(), re.M)]
    if group.exists() and (text := group.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits, default=None)


# ---------------------------------------------------------------------- the self-tests


def self_test() -> Iterator[Finding]:
    """A tiny forward and backward pass of every mechanism, against the reference kernels."""
    import torch

    from subquad.cli.self_test import TOLERANCE, distance_to_reference
    from subquad.mixers.registry import loadable

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for one another make a second of this a minute
    try:
        names, broken = loadable()
        distances = {name: distance_to_reference(name) for name in names}
    finally:
        torch.set_num_threads(threads)
    for problem in broken:
        yield Finding("self-test", "broken", problem, "install or remove the package that it names")
    yield _agreement("self-test", distances, TOLERANCE, "the reference kernels")


def gpu_self_test() -> Iterator[Finding]:
    """The same on every GPU, with its own kernels, and a few updates of a small model."""
    import torch

    from subquad.cli.self_test import GPU_TOLERANCE, gpu_distance_to_reference, gpu_loss_distance
    from subquad.mixers.registry import loadable

    for number in range(torch.cuda.device_count()):
        device, name = torch.device("cuda", number), f"self-test on cuda:{number}"
        distances = {mechanism: gpu_distance_to_reference(mechanism, device) for mechanism in loadable()[0]}
        yield _agreement(name, distances, GPU_TOLERANCE, "the reference in float64")
        distance = gpu_loss_distance(device)
        if distance <= GPU_TOLERANCE:
            yield Finding(name, "ok", "updates of a language model have the losses that they have on the CPU")
        else:
            text = f"losses of a language model differ from those on the CPU by {distance:.1e}"
            yield Finding(name, "broken", text, "report this, with the versions above")


def _agreement(name: str, distances: dict[str, float], tolerance: float, reference: str) -> Finding:
    wrong = [f"{mechanism} by {distance:.1e}" for mechanism, distance in distances.items() if not distance <= tolerance]
    if wrong:
        remedy = f"set {KERNELS}=reference for right results, and report this"
        return Finding(name, "broken", f"differs from {reference}: {', '.join(wrong)}", remedy)
    return Finding(name, "ok", f"forward and backward of {len(distances)} mechanisms agree with {reference}")
