"""The rendered pod, run: its flags, its probes in every state, its Secrets as they are renewed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from typing import TYPE_CHECKING

import grpc
import pytest
from deploy.chart import EXAMPLES
from rollwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from rollwire_client import Credentials
from rollwire_client._rpc.channel import connect
from support.calls import Generation, connected, request
from support.certificates import Authority
from support.checkpoints import dense
from support.publishing import publish, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deploy.chart import Helm
    from deploy.pod import RunPod

SYNTHETIC = ("--set", "engine=synthetic,engineArgs=null")


def secret_of(authority: Authority, name: str) -> dict[str, bytes]:
    """The content of a kubernetes.io/tls Secret, as cert-manager makes it."""
    made = authority.sign(name)
    return {
        "tls.crt": made.certificate.read_bytes(),
        "tls.key": made.key.read_bytes(),
        "ca.crt": authority.certificate.read_bytes(),
    }


@contextlib.contextmanager
def kept_waiting(path: Path) -> Iterator[None]:
    """Whoever opens the file meanwhile waits: it is leased, and a break of the lease not answered.

    The kernel's limit to that is 45 seconds.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # tells of a break
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"the file system of {path} has no leases: {error}")
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.slow
async def test_a_server_that_loads_is_alive_and_not_ready(
    helm: Helm, run_pod: RunPod, tmp_path: Path
) -> None:
    model = dense(tmp_path / "models" / "policy-7b")
    values = ("--set", "awaitWeights=false,flags.dtype=float32")
    with kept_waiting(model / "config.json"):
        pod = run_pod(helm.render("policy", *values), models=model.parent)
        await pod.started()
        assert await pod.probe("liveness") == "SERVING"
        assert await pod.probe("readiness") == "NOT_SERVING"
    await pod.until_probe("readiness", "SERVING")


async def test_probes_of_a_policy_from_its_first_weights_to_its_end(
    helm: Helm, run_pod: RunPod
) -> None:
    pod = run_pod(helm.render("policy", *SYNTHETIC))
    await pod.started()
    async with connected(pod.address("api")) as api:
        await api.reaches(common_pb2.SERVER_STATE_AWAITING_WEIGHTS)
        assert await pod.probe("readiness") == "NOT_SERVING"
        assert await pod.probe("liveness") == "SERVING"

        await publish(api, await random_weights(api, 1))
        await pod.until_probe("readiness", "SERVING")

        running = Generation(api, request((1,), 100_000))
        await running.some()
        pod.terminate()
        await pod.until_probe("readiness", "NOT_SERVING")
        assert await pod.probe("liveness") == "SERVING"
        assert len((await running.some(len(running.output.tokens) + 5)).tokens) > 5
        pod.terminate()  # the second time: it does not wait for what runs
        assert (await running.all()).reason == "INTERRUPTED"
    assert pod.wait() == 0


async def test_a_judge_is_ready_at_once(helm: Helm, run_pod: RunPod) -> None:
    pod = run_pod(helm.render("judge", *SYNTHETIC))
    await pod.until_probe("readiness", "SERVING")


@pytest.mark.parametrize("example", sorted(set(EXAMPLES) - {"policy", "judge", "secure"}))
async def test_its_flags_and_variables_are_the_servers(
    helm: Helm, run_pod: RunPod, example: str
) -> None:
    await run_pod(helm.render(example, *SYNTHETIC)).started()


async def test_tls_tokens_and_their_renewal(
    helm: Helm, run_pod: RunPod, authority: Authority, tmp_path: Path
) -> None:
    secrets = {
        "rollwire-tls": secret_of(authority, "server"),
        "rollwire-tokens": {"rollout": b"r1", "control": b"c1"},
    }
    pod = run_pod(helm.render("secure", *SYNTHETIC), secrets)
    await pod.started()  # probes need neither certificate nor token
    own = authority.sign("trainer")

    async def calls(token: str, trusted: Authority = authority) -> grpc.StatusCode:
        credentials = Credentials(
            token=token,
            ca=trusted.certificate,
            certificate=own.certificate,
            key=own.key,
            server_name="localhost",
        )
        async with connect(pod.address("api"), credentials) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            try:
                await stub.GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    assert await calls("r1") is grpc.StatusCode.OK
    assert await calls("c1") is grpc.StatusCode.OK
    assert await calls("r2") is grpc.StatusCode.UNAUTHENTICATED

    other = Authority(tmp_path, "other")
    renewed = {**secret_of(other, "renewed"), "ca.crt": authority.certificate.read_bytes()}
    pod.renew({"rollwire-tls": renewed, "rollwire-tokens": {"rollout": b"r2", "control": b"c2"}})
    assert await calls("r2", other) is grpc.StatusCode.OK
    assert await calls("r1", other) is grpc.StatusCode.UNAUTHENTICATED
    assert await calls("r2", authority) is grpc.StatusCode.UNAVAILABLE
