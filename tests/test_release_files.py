"""Files that other machines run: images and the workflow keep to what the project itself says."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = {kind.rpartition(" ")[2] for kind in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", kind)}


def instructions(name: str) -> list[tuple[str, str]]:
    """Instruction and words of each line of a Dockerfile; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    split = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(first, rest) for first, rest in split]


@pytest.fixture(params=["Dockerfile", "Dockerfile.cuda"])
def dockerfile(request) -> list[tuple[str, str]]:
    return instructions(request.param)


def test_images_run_as_a_user_who_is_made_before(dockerfile) -> None:
    names = [first for first, _ in dockerfile]
    (user,) = [rest for first, rest in dockerfile if first == "USER"]
    assert user not in ("root", "0")
    made = [index for index, (first, rest) in enumerate(dockerfile) if first == "RUN" and "useradd" in rest]
    assert made[0] < names.index("USER") < names.index("ENTRYPOINT")
    assert names[names.index("USER") :] == ["USER", "WORKDIR", "ENTRYPOINT", "CMD"]


def test_images_install_the_pinned_versions_of_existing_extras(dockerfile) -> None:
    given = dict(rest.split("=") for first, rest in dockerfile if first == "ARG" and "=" in rest)
    assert given["PYTHON"] in PYTHONS
    assert set(given["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    assert any("PIP_CONSTRAINT=/source/constraints.txt" in rest for first, rest in dockerfile if first == "ENV")
    assert "http" not in str(dockerfile)


def test_images_copy_what_is_there_and_is_not_ignored(dockerfile) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [rest.split()[:-1] for first, rest in dockerfile if first == "COPY" and "--from" not in rest]
    assert sorted(name for names in copied for name in names) == sorted(allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_the_workflow_runs_what_a_merge_needs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    assert set(jobs["check"]["strategy"]["matrix"]["python"]) == PYTHONS
    ran = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert ran == {"check": [".ci/run"], "lowest": ["make test-lowest"], "nightly": ["make nightly"]}
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert workflow["permissions"] == {"contents": "read"}


def test_the_checklist_names_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`(?:[^`]*&& )?make ([a-z-]+)", (ROOT / "RELEASE.md").read_text()))
    assert {"docs", "nightly", "test"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_make_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(makefile.partition(".PHONY:")[2].partition("\n")[0].split())
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[1] for line in shown.splitlines()} == targets
    assert all(line.endswith(".") for line in shown.splitlines())
