"""The gateway's part of the chart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import typer
from deploy.chart import CHART
from rollwire_client._cli.app import app

if TYPE_CHECKING:
    from deploy.chart import Helm, Object, Rendered

ON = ("--set", "gateway.enabled=true")
VOLUME = ("--set", "gateway.checkpointVolume.persistentVolumeClaim.claimName=checkpoints")
CLOSED = ("--set", "gateway.tls.secret=https,gateway.tokens.secret=clients")
SELECTOR = {"app.kubernetes.io/name": "rollwire-gateway", "app.kubernetes.io/instance": "fleet"}


def of_gateway(rendered: Rendered, kind: str) -> Object:
    (found,) = (o for o in rendered.all(kind) if o["metadata"]["name"].endswith("-gateway"))
    return found


def container_of(rendered: Rendered) -> Object:
    (container,) = of_gateway(rendered, "Deployment")["spec"]["template"]["spec"]["containers"]
    found: Object = container
    return found


@pytest.mark.parametrize("example", ["cpu", "policy", "secure", "judge"])
@pytest.mark.parametrize("more", [(), (*VOLUME, *CLOSED)])
def test_every_object_is_what_kubernetes_takes(
    helm: Helm, example: str, more: tuple[str, ...]
) -> None:
    rendered = helm.render(example, *ON, *more)
    for version in ("1.30", "1.37"):
        for found in rendered.objects:
            if found["kind"] not in {"PodMonitor", "PrometheusRule"}:
                kubernetes_validate.validate(found, version, strict=True)
    pod = of_gateway(rendered, "Deployment")["spec"]["template"]["spec"]
    mounts = {mount["name"] for mount in container_of(rendered)["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_without_it_nothing_is_rendered(helm: Helm) -> None:
    assert "gateway" not in json.dumps(helm.render("policy").objects)


def test_the_servers_service_does_not_find_it(helm: Helm) -> None:
    rendered = helm.render("cpu", *ON)
    labels = of_gateway(rendered, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for service in rendered.all("Service"):
        found = service["spec"]["selector"].items() <= labels.items()
        assert found == service["metadata"]["name"].endswith("-gateway")


def test_its_arguments_are_those_of_the_command(helm: Helm) -> None:
    rendered = helm.render(
        "secure", *ON, *VOLUME, *CLOSED, "--set", "gateway.flags.max-sequences=9"
    )
    arguments = container_of(rendered)["args"]
    split = arguments.index("gateway")
    assert container_of(rendered)["command"] == ["rollwire"]
    assert arguments[split + 1] == "dns:///fleet-rollwire.default.svc:50051"
    assert "--tokenizer=/models/policy-7b" in arguments
    assert "--token-file=/etc/rollwire/fleet-tokens/control" in arguments[:split]
    commands: Any = typer.main.get_command(app)
    for context, given in (
        (commands, arguments[:split]),
        (commands.commands["gateway"], arguments[split + 2 :]),
    ):
        known = {name for parameter in context.params for name in parameter.opts}
        assert {argument.partition("=")[0] for argument in given} <= known
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["gateway"]
    flags = {f"--{name}" for name in schema["properties"]["flags"]["properties"]}
    assert flags <= {n for p in commands.commands["gateway"].params for n in p.opts}


def test_a_gateway_that_only_samples_has_the_lesser_token(helm: Helm) -> None:
    arguments = container_of(helm.render("secure", *ON))["args"]
    assert "--token-file=/etc/rollwire/fleet-tokens/rollout" in arguments


@pytest.mark.parametrize(("more", "doors"), [((), ["api"]), (VOLUME, ["api", 52000])])
def test_it_reaches_the_servers(helm: Helm, more: tuple[str, ...], doors: list[Any]) -> None:
    (policy,) = (
        o for o in helm.render("cpu", *ON, *more).all("NetworkPolicy")
        if o["metadata"]["name"] == "fleet-rollwire"
    )  # fmt: skip
    (rule,) = (
        rule
        for rule in policy["spec"]["ingress"]
        if rule["from"] == [{"podSelector": {"matchLabels": SELECTOR}}]
    )
    assert [port["port"] for port in rule["ports"]] == doors


def test_probes_and_the_grace_period(helm: Helm) -> None:
    rendered = helm.render("cpu", *ON, *CLOSED, "--set", "gateway.drainSeconds=100")
    container = container_of(rendered)
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/ping"
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    pod = of_gateway(rendered, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 100 + 5


def test_tokens_need_https(helm: Helm) -> None:
    done = helm.template("cpu", *ON, "--set", "gateway.tokens.secret=clients")
    assert done.returncode != 0
    assert "gateway.tokens.secret needs gateway.tls.secret" in done.stderr
