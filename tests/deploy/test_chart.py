"""What the chart renders: valid objects, and the promises that a cluster relies on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import kubernetes_validate
import pytest
from deploy.chart import CHART, EXAMPLES, documents
from rollwire_server.settings import ServerSettings, read_settings

if TYPE_CHECKING:
    from deploy.chart import Helm, Object, Rendered

SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM = {
    kind: json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())
    for kind in ("PodMonitor", "PrometheusRule")
}
KUBERNETES = ["1.30", "1.37"]  # the oldest that the chart takes, and the newest that is known


@pytest.mark.parametrize("example", EXAMPLES)
def test_lint(helm: Helm, example: str) -> None:
    values = str(CHART / "examples" / f"{example}.yaml")
    done = helm.run("lint", "--strict", str(CHART), "--values", values)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_object_is_what_kubernetes_takes(helm: Helm, example: str) -> None:
    for rendered in helm.render(example).objects:
        if schema := CUSTOM.get(rendered["kind"]):
            jsonschema.validate(rendered, schema)
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(rendered, version, strict=True)


def test_what_is_rendered(helm: Helm) -> None:
    always = [
        "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount",
    ]  # fmt: skip
    watched = ["ConfigMap", "PodMonitor", "PrometheusRule"]
    assert sorted(o["kind"] for o in helm.render("cpu").objects) == always
    assert sorted(o["kind"] for o in helm.render("policy").objects) == sorted(always + watched)
    closed = helm.render("cpu", "--set", "networkPolicy.enabled=false")
    assert not closed.all("NetworkPolicy")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("model=", "/model"),
        ("modle=x", "'modle' not allowed"),
        ("flags.max-runing=3", "'max-runing' not allowed"),
        ("flags.listen=0.0.0.0:1", "'listen' not allowed"),
        ("flags.max-running=many", "/flags/max-running"),
        ("flags.staging=disk", "/flags/staging"),
        ("engine=steam", "/engine"),
        ("replicas=-1", "/replicas"),
        ("replicas=1.5", "/replicas"),
        ("frozen=perhaps", "/frozen"),
        ("drainSeconds=-1", "/drainSeconds"),
        ("drainSeconds=1m", "/drainSeconds"),
        ("env.ROLLWIRE_LISTEN=x", "'ROLLWIRE_LISTEN'"),
        ("gpu.count=-1", "/gpu/count"),
        ("gpu.resource=gpu", "/gpu/resource"),
        ("rdma.resource=hca", "/rdma/resource"),
        ("sharedMemory=8GB", "/sharedMemory"),
        ("resources.limits.memory=lots", "/resources/limits/memory"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("tls.secret=No_Name", "/tls/secret"),
        ("networkPolicy.trainers[0].podSelector=null", "/networkPolicy/trainers/0"),
        ("networkPolicy.trainers[0].podSelector.matchLabels=null", "/trainers/0/podSelector"),
        ("networkPolicy.trainers[0].pods=all", "'pods' not allowed"),
        ("tokens.secret=t", "tokens.secret needs tls.secret"),
        ("tls.mutual=true", "tls.mutual needs tls.secret"),
        ("transport.ports=many", "/transport/ports"),
        ("transport.ports=52000", "/transport/ports"),
        ("transport.ports=52999-52000", "at least 16 ports"),
        ("transport.ports=52000-52014", "at least 16 ports"),
        ("transport.ports=60000-70000", "none above 65535"),
        ("transport.ports=50000-51000", "50051, which is that of api"),
        ("transport.ports=9000-9500", "9464, which is that of metrics"),
        ("model=/models/x", "name the volume that holds it as modelVolume"),
    ],
)
def test_wrong_values_are_refused(helm: Helm, values: str, said: str) -> None:
    done = helm.template("cpu", "--set", values)
    assert done.returncode != 0, done.stdout
    assert said in done.stderr, done.stderr


@pytest.mark.parametrize("release", ["true", "null", "e1", "on", "rollwire"])
def test_names_that_yaml_takes_for_something_else(helm: Helm, release: str) -> None:
    done = helm.run(
        "template", release, str(CHART), "--values", str(CHART / "examples" / "secure.yaml"),
        "--set-string", "tls.secret=true,tokens.secret=123,image.pullSecrets[0]=yes",
        "--set-string", "priorityClassName=on,runtimeClassName=off,env.ON=1e3,env.n=y",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rendered in documents(done.stdout):
        kubernetes_validate.validate(rendered, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("release", ["0x1f", "a.b"])
def test_a_release_whose_service_could_not_be(helm: Helm, release: str) -> None:
    values = str(CHART / "examples" / "cpu.yaml")
    done = helm.run("template", release, str(CHART), "--values", values)
    assert done.returncode != 0
    assert f"the Service {release}-rollwire" in done.stderr


def test_a_model_must_be_named(helm: Helm) -> None:
    done = helm.run("template", "fleet", str(CHART))
    assert done.returncode != 0
    assert "/model" in done.stderr


# Flags.


def flags_of(rendered: Rendered) -> set[str]:
    names = (argument.partition("=")[0].removeprefix("--") for argument in rendered.arguments)
    return {name.removeprefix("no-") for name in names}


def test_values_can_say_every_flag_of_the_server(helm: Helm) -> None:
    """A flag is new, gone or renamed: then values.schema.json (flags) or rollwire.args changes."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    by_hand = set(schema["properties"]["flags"]["properties"])
    chart = flags_of(helm.render("secure", "--set", "engineArgs.a=b")) - by_hand
    chart |= flags_of(helm.render("judge")) - by_hand
    assert not by_hand & chart
    server = {field.replace("_", "-") for field in ServerSettings.model_fields}
    assert by_hand | chart == server - {"ready-file"}


def test_values_arrive_at_the_server(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServerSettings.model_fields:
        monkeypatch.delenv(f"ROLLWIRE_{name.upper()}", raising=False)
    rendered = helm.render(
        "cpu",
        "--set", "model=/a model=1,frozen=true,engineArgs.vocab-size=7",
        "--set", "flags.max-running=1000000,flags.reflection=false,flags.dtype=bfloat16",
        "--set-json", "drainSeconds=0.5,flags.pause-lease-seconds=0.25",
        "--set-json", "flags.max-sequence-seconds=1e7,engineArgs.big=10000000",
    )  # fmt: skip
    settings = read_settings(rendered.arguments)
    assert settings.model == "/a model=1"
    assert settings.frozen
    assert not settings.await_weights
    assert settings.drain_seconds == 0.5
    assert sorted(settings.engine_arg) == ["big=10000000", "vocab-size=7"]
    assert settings.max_running == 1_000_000
    assert not settings.reflection
    assert settings.dtype == "bfloat16"
    assert settings.max_sequence_seconds == 1e7
    assert settings.pause_lease_seconds == 0.25


def test_a_policy_awaits_weights_unless_told_otherwise(helm: Helm) -> None:
    assert "--await-weights" in helm.render("policy").arguments
    assert "--await-weights" not in helm.render("policy", "--set", "awaitWeights=false").arguments
    judge = helm.render("judge").arguments
    assert "--frozen" in judge
    assert "--await-weights" not in judge


# Going up and down.


@pytest.mark.parametrize("drain", ["0", "0.5", "60", "3600"])
def test_the_grace_period_is_longer_than_what_comes_in_it(helm: Helm, drain: str) -> None:
    rendered = helm.render("cpu", "--set-json", f"drainSeconds={drain}")
    before = rendered.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert read_settings(rendered.arguments).drain_seconds == float(drain)
    flushing = 2 * 2 + 10
    assert rendered.pod["terminationGracePeriodSeconds"] > before + float(drain) + flushing


@pytest.mark.parametrize("example", EXAMPLES)
def test_probes(helm: Helm, example: str) -> None:
    container = helm.render(example).container
    startup, liveness, readiness = (
        container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")
    )
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {p["grpc"]["port"] for p in (startup, liveness, readiness)} == {ports["health"]}
    assert startup["failureThreshold"] * startup["periodSeconds"] == 30 * 60
    assert "service" not in startup["grpc"]
    assert "service" not in liveness["grpc"]
    assert readiness["grpc"]["service"] == "rollwire.v1.RolloutService"


def test_the_trainer_finds_servers_that_are_not_ready(helm: Helm) -> None:
    rendered = helm.render("policy")
    service = rendered.one("Service")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    labels = rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        service["selector"],
        rendered.one("Deployment")["spec"]["selector"]["matchLabels"],
        rendered.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        rendered.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        rendered.one("PodMonitor")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert "app.kubernetes.io/instance" in selector
    assert rendered.one("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


# What a pod may do.


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_has_no_more_rights_than_it_needs(helm: Helm, example: str) -> None:
    rendered = helm.render(example)
    pod, container = rendered.pod, rendered.container
    assert pod["automountServiceAccountToken"] is False
    assert rendered.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"]["drop"] == ["ALL"]
    added = ["IPC_LOCK"] if example == "rdma" else []
    assert rights["capabilities"].get("add", []) == added
    assert "command" not in container  # the image's entry point


@pytest.mark.parametrize("example", EXAMPLES)
def test_mounts(helm: Helm, example: str) -> None:
    rendered = helm.render(example)
    volumes = {volume["name"]: volume for volume in rendered.pod["volumes"]}
    mounts = rendered.container["volumeMounts"]
    assert {mount["name"] for mount in mounts} == set(volumes)
    assert not any("subPath" in mount for mount in mounts)  # a renewal would not arrive
    writable = {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}
    assert writable == {"/dev/shm", "/tmp"}  # noqa: S108
    shared = next(mount["name"] for mount in mounts if mount["mountPath"] == "/dev/shm")  # noqa: S108
    assert volumes[shared]["emptyDir"]["medium"] == "Memory"
    environment = {e["name"]: e["value"] for e in rendered.container["env"]}
    assert environment["HOME"] in writable
    named = [re.sub("^.*?=", "", a) for a in rendered.arguments if re.search("=/", a)]
    paths = [mount["mountPath"] for mount in mounts]
    assert all(any(path.startswith(f"{p}/") for p in paths) for path in named)


def test_devices(helm: Helm) -> None:
    def limits(example: str, *more: str) -> Object:
        found: Object = helm.render(example, *more).container["resources"]["limits"]
        return found

    assert limits("policy") == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert limits("policy", "--set", "gpu.count=4,gpu.resource=amd.com/gpu")["amd.com/gpu"] == 4
    assert limits("cpu") == {"memory": "4Gi"}
    rdma = limits("rdma")
    assert rdma["rdma/hca_shared_devices_a"] == rdma["nvidia.com/gpu"] == 1


# Who gets in.

TRAINER = {"app.kubernetes.io/component": "trainer"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
SERVER = {"app.kubernetes.io/name": "rollwire", "app.kubernetes.io/instance": "fleet"}
OTHER_FLEET = SERVER | {"app.kubernetes.io/instance": "other"}


def doors(rendered: Rendered, labels: dict[str, str], namespace: str) -> set[str]:
    """What a NetworkPolicy lets a pod reach: names and ranges of ports, "*" for all."""
    own = "fleets"
    policy = rendered.one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]

    def selects(selector: Object, of: dict[str, str]) -> bool:
        assert set(selector) == {"matchLabels"}
        return bool(selector["matchLabels"].items() <= of.items())

    def is_peer(peer: Object) -> bool:
        anywhere = peer.get("namespaceSelector")
        here = (
            selects(anywhere, {"kubernetes.io/metadata.name": namespace})
            if anywhere is not None
            else namespace == own
        )
        return here and ("podSelector" not in peer or selects(peer["podSelector"], labels))

    def told(port: Object) -> str:
        return f"{port['port']}-{port['endPort']}" if "endPort" in port else port.get("port", "*")

    return {
        told(port)
        for rule in policy["ingress"] or []
        if "from" not in rule or not rule["from"] or any(map(is_peer, rule["from"]))
        for port in rule["ports"]
    }


@pytest.mark.parametrize(
    ("example", "labels", "namespace", "open_doors"),
    [
        ("policy", TRAINER, "fleets", {"api", "52000-52999"}),
        ("policy", TRAINER, "elsewhere", set()),
        ("policy", SERVER, "fleets", {"52000-52999"}),  # weights go from server to server
        ("policy", OTHER_FLEET, "fleets", set()),
        ("policy", PROMETHEUS, "monitoring", {"metrics"}),
        ("policy", PROMETHEUS, "fleets", set()),
        ("policy", {}, "monitoring", set()),
        ("secure", TRAINER, "training", {"api", "52000-52999"}),
        ("secure", TRAINER, "fleets", set()),
        ("judge", TRAINER, "fleets", {"api"}),
        ("judge", SERVER, "fleets", set()),
    ],
)
def test_who_gets_in(
    helm: Helm, example: str, labels: dict[str, str], namespace: str, open_doors: set[str]
) -> None:
    assert doors(helm.render(example), labels, namespace) == open_doors


def test_where_transfers_listen_is_what_the_policy_opens(helm: Helm) -> None:
    chosen = helm.render("policy", "--set", "transport.ports=40000-40099")
    assert read_settings(chosen.arguments).transport_listen == "0.0.0.0:40000-40099"
    (sysctl,) = chosen.pod["securityContext"]["sysctls"]
    assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": "40000 40099"}
    assert doors(chosen, SERVER, "fleets") == {"40000-40099"}
    for rendered, ports in (
        (helm.render("policy", "--set", "transport.ports="), {"*"}),
        (helm.render("judge"), {"api"}),
    ):
        assert read_settings(rendered.arguments).transport_listen is None
        assert "sysctls" not in rendered.pod["securityContext"]
        assert doors(rendered, TRAINER, "fleets") == ports


def test_nobody_named_is_nobody_let_in(helm: Helm) -> None:
    nobody = "networkPolicy.trainers=null,networkPolicy.prometheus=null"
    rendered = helm.render("policy", "--set", nobody)
    assert doors(rendered, TRAINER, "fleets") == set()
    assert doors(rendered, PROMETHEUS, "monitoring") == set()
    kubernetes_validate.validate(rendered.one("NetworkPolicy"), KUBERNETES[0], strict=True)
