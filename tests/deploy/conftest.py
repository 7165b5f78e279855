"""What the tests of deploy/ share."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from deploy.chart import Helm, unpack_helm
from deploy.pod import Pod
from support import own

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deploy.chart import Rendered
    from deploy.pod import RunPod, Secrets
    from support.namespaces import Machine

_numbers = itertools.count(2)


@pytest.fixture(scope="package")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    folder = tmp_path_factory.mktemp("helm")
    return Helm(unpack_helm(folder), folder / "home")


@pytest.fixture
def run_pod(tmp_path: Path) -> Iterator[RunPod]:
    """Runs the pod of a rendered release as a process; ended after the test."""
    pods: list[Pod] = []

    def run(
        rendered: Rendered,
        secrets: Secrets | None = None,
        machine: Machine | None = None,
        **volumes: Path,
    ) -> Pod:
        # All of 127.0.0.0/8 is loopback, so that each pod has an address of its own, and all ports
        # of it.
        host = own.host(next(_numbers)) if machine is None else machine.address
        folder = tmp_path / host
        pods.append(Pod(rendered, folder, host, secrets or {}, volumes, machine))
        return pods[-1]

    try:
        yield run
    finally:
        for pod in pods:
            pod.kill()
    for pod in pods:
        text = pod.log.read_text()
        assert "Traceback" not in text, text
        assert "environment variables that are no settings" not in text, text
