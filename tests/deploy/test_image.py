"""The images: no daemon builds them here, so what can be checked of their recipe is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from deploy.chart import CHART, DEPLOY, ROOT
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from deploy.chart import Helm

RECIPE = DEPLOY / "Dockerfile"
IMAGES = ["cpu", "gpu", "sglang"]


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def told(self, instruction: str) -> list[str]:
        return [rest for word, rest in self.steps if word == instruction]


def stages() -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", RECIPE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, Stage] = {}
    for line in filter(None, text.splitlines()):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name] = Stage(base, name)
        elif found:
            stage.steps.append((word, rest))
    return found


def line_of(image: str) -> list[Stage]:
    """The stages that an image consists of, from its base on."""
    known, chain = stages(), [stages()[image]]
    while chain[0].base in known:
        chain.insert(0, known[chain[0].base])
    return chain


def copied() -> list[str]:
    """What comes from the clone."""
    every = [rest.split() for stage in stages().values() for rest in stage.told("COPY")]
    return [path for words in every if not words[0].startswith("--from") for path in words[:-1]]


def test_lint() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "--config", DEPLOY / "hadolint.yaml", RECIPE],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_default_is_the_small_one() -> None:
    assert list(stages())[-1] == "cpu"


def test_all_that_is_copied_is_there_and_let_through() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *copied()], cwd=ROOT, capture_output=True, text=True, timeout=240,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    let_through = [
        line.removeprefix("!")
        for line in RECIPE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert sorted(let_through) == sorted(copied())
    for path in copied():
        assert any(f == path or f.startswith(f"{path}/") for f in tracked), path
    for stage in stages().values():
        for words in (rest.split() for rest in stage.told("COPY")):
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in stages()


def test_what_is_copied_makes_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in copied():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, source / path)
        else:
            shutil.copy(ROOT / path, source / path)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=source, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entries,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "rollwire-server = " in archive.read(entries).decode()
    assert {"rollwire_server/main.py", "rollwire/v1/rollout_pb2.py"} <= set(names)


def test_what_is_installed_is_what_the_project_offers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    steps = [step for stage in stages().values() for step in stage.told("RUN")]
    offered = project["optional-dependencies"]
    for step in steps:
        for extras in re.findall(r"\.\[([^]]+)\]", step):
            assert set(extras.split(",")) <= set(offered)
    (ucx,) = (r for r in offered["ucx"] if r.startswith("ucxx"))
    assert stages()["build-gpu"].told("ARG") == [f"UCXX={ucx}"]
    installing = [step for step in steps if "pip install" in step]
    pinned = ("--constraint requirements/dev.txt", '"${SGLANG}"')
    assert all(any(pin in step for pin in pinned) for step in installing)


def test_sglang_is_the_one_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stage = stages()["build-sglang"]
    (told,) = stage.told("ARG")
    version = told.removeprefix("SGLANG=sglang==")
    (tested,) = re.findall(r"^SGLANG := sglang==(\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert version == tested
    (taken,) = (r for r in project["optional-dependencies"]["sglang"] if r.startswith("sglang"))
    assert Requirement(taken).specifier.contains(version)
    assert ".[sglang," in stage.told("RUN")[-1]


def test_an_engine_of_the_chart_is_in_an_image(helm: Helm) -> None:
    rendered = helm.render("sglang")
    assert "--engine=sglang" in rendered.arguments
    assert rendered.container["image"].endswith("-sglang")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert rendered.container["image"] == f"rollwire:{chart['appVersion']}-sglang"
    assert "--target sglang" in (CHART / "examples" / "sglang.yaml").read_text()


def test_the_chart_runs_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert project["version"].split(".dev")[0] == chart["appVersion"]
    assert f"rollwire:{chart['appVersion']}" in RECIPE.read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_what_the_chart_runs(helm: Helm, image: str) -> None:
    chain = line_of(image)
    rendered = helm.render("cpu")
    user = [rest for stage in chain for rest in stage.told("USER")][-1]
    security = rendered.pod["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    (exposed,) = (rest for stage in chain for rest in stage.told("EXPOSE"))
    ports = [str(port["containerPort"]) for port in rendered.container["ports"]]
    assert exposed.split() == ports
    (entry,) = (rest for stage in chain for rest in stage.told("ENTRYPOINT"))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry == '["rollwire-server"]'
    assert "rollwire-server" in scripts


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_ends_with_a_user_without_rights(image: str) -> None:
    words = [word for stage in line_of(image) for word, _ in stage.steps]
    assert "USER" in words
    last = len(words) - 1 - words[::-1].index("USER")
    assert set(words[last + 1 :]) <= {"COPY", "WORKDIR", "EXPOSE", "ENTRYPOINT"}
    for stage in line_of(image):
        for rest in stage.told("COPY"):
            assert rest.split()[1:] == ["/opt/rollwire", "/opt/rollwire"]


def test_nothing_that_builds_is_left_in_the_small_image() -> None:
    steps = [rest for stage in line_of("cpu") for rest in stage.told("RUN")]
    assert not any(re.search(r"\b(pip|apt-get|gcc|make|git|curl)\b", step) for step in steps)


def test_no_registry_is_named() -> None:
    bases = {stage.base for stage in stages().values()} - set(stages())
    assert bases == {"python:${PYTHON}", "scratch"}
    assert "://" not in RECIPE.read_text()
