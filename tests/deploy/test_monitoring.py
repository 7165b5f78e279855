"""Alerts and dashboard: they ask only for what a server tells, and each alert has its runbook."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from deploy.chart import CHART, ROOT
from prometheus_client.parser import text_string_to_metric_families
from support.calls import connected
from support.publishing import publish, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.chart import Helm, Object
    from deploy.pod import RunPod

RULES = CHART / "rules" / "rollwire.yaml"
SERIES = re.compile(r"\b(rollwire_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)(=~|!~|!=|=)\"([^\"]*)\"")
PROMETHEUS_LABELS = {"namespace", "job", "pod"}  # of the scrape


def alerts() -> list[Object]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def panels() -> list[Object]:
    dashboard = json.loads((CHART / "dashboards" / "rollwire.json").read_text())
    found: list[Object] = dashboard["panels"]
    return found


def expressions() -> Iterator[str]:
    for alert in alerts():
        yield alert["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


async def test_every_series_is_one_that_a_server_tells(helm: Helm, run_pod: RunPod) -> None:
    pod = run_pod(helm.render("policy", "--set", "engine=synthetic"))
    await pod.started()
    async with connected(pod.address("api")) as api:
        await publish(api, await random_weights(api, 1))

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{pod.address('metrics')}/metrics", timeout=60) as page:
            text: str = page.read().decode()
            return text

    told: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(scrape)):
        for sample in family.samples:
            labels = told.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)

    asked = [found for expression in expressions() for found in SERIES.findall(expression)]
    assert len(asked) > 15
    for name, selector in asked:
        assert name in told
        for label, _, values in MATCHER.findall(selector):
            if label not in PROMETHEUS_LABELS:
                assert set(values.split("|")) <= told[name][label], (name, selector)


def test_every_label_of_a_panel_is_there(helm: Helm) -> None:
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.search(r"by \(([\w, ]+)\)", target["expr"])
            assert grouped is not None, target
            assert shown <= set(grouped[1].split(", "))
            assert 'job=~"$fleet"' in target["expr"]
    content = helm.render("policy").one("ConfigMap")
    assert json.loads(content["data"]["rollwire.json"])["panels"] == panels()
    assert content["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_release_carries_the_rules(helm: Helm) -> None:
    rendered = helm.render("policy")
    assert rendered.one("PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())
    monitor = rendered.one("PodMonitor")
    ports = {port["name"] for port in rendered.container["ports"]}
    assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= ports
    for custom in (monitor, rendered.one("PrometheusRule")):
        assert custom["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_every_alert_has_its_runbook() -> None:
    operating = (ROOT / "docs" / "operating.md").read_text()
    assert re.findall(r"^### (Rollwire\w+)$", operating, re.MULTILINE) == [
        alert["alert"] for alert in alerts()
    ]


@pytest.fixture
def promtool() -> str:
    if (found := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found


@pytest.mark.parametrize("what", [["check", "rules", RULES], ["test", "rules", "alerts.yaml"]])
def test_the_alerts_fire_when_they_should(promtool: str, what: list[str | Path]) -> None:
    done = subprocess.run(
        [promtool, *what], capture_output=True, text=True, timeout=240, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
