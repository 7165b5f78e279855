"""TLS, tokens and their scopes, and health for everybody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2_grpc
from rollwire_server.security import SCOPES, Scope
from support.calls import Api, connected, generate, reason_of, request
from support.certificates import Authority
from support.health import ready
from support.publishing import Update, random_weights

if TYPE_CHECKING:
    from pathlib import Path

    from support.certificates import Certificate
    from support.servers import StartServer

ROLLOUT, CONTROL = "rollout-secret", "control-secret"
SYNTHETIC = ("--engine", "synthetic")
SCHEMA = "/rollwire.v1.WeightService/GetWeightSchema"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tokens(tmp_path: Path) -> list[str]:
    """The flags of a server that wants them."""
    (tmp_path / "rollout").write_text(f"{ROLLOUT}\n")
    (tmp_path / "control").write_text(CONTROL)
    files = ("--rollout-token-file", "rollout"), ("--control-token-file", "control")
    return [word for flag, name in files for word in (flag, str(tmp_path / name))]


async def reason(channel: grpc.aio.Channel, method: str, token: str | None) -> str:
    """Why a call is refused, or "" when the door is open, whatever comes of it."""
    while True:
        metadata = None if token is None else bearer(token)
        call: Any = channel.stream_stream(method)(metadata=metadata, timeout=60)
        try:
            await call.write(b"")
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            if error.code() in refused:
                return reason_of(error)
        # What grpc.aio's client makes of a write to a call that the server has just ended.
        if await call.details() != "Internal error from Core":
            return ""


async def test_every_call_has_its_scope(start_server: StartServer, tokens: list[str]) -> None:
    server = start_server(*SYNTHETIC, *tokens)
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method, scope in SCOPES.items():
            for token in (None, "", "wrong", ROLLOUT[:-1], ROLLOUT + "x"):
                assert await reason(channel, method, token) == "UNAUTHENTICATED", method
            limited = "PERMISSION_DENIED" if scope is Scope.CONTROL else ""
            assert await reason(channel, method, ROLLOUT) == limited, method
            assert await reason(channel, method, CONTROL) == "", method
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        assert await reason(channel, reflection, None) == "UNAUTHENTICATED"
        assert await reason(channel, reflection, ROLLOUT) == ""
    assert await ready(server.address)
    log = server.log.read_text()
    assert "UNAUTHENTICATED" in log
    for secret in (ROLLOUT, CONTROL, "wrong"):
        assert secret not in log


def test_the_scopes_are_those_that_are_written_down() -> None:
    service = "/rollwire.v1.RolloutService/"
    rollout = {method for method, scope in SCOPES.items() if scope is Scope.ROLLOUT}
    names = ("Generate", "StreamRollouts", "Abort", "GetServerInfo")
    assert rollout == {service + name for name in names}
    assert len(SCOPES) == 14


async def test_abort_of_all_needs_control(start_server: StartServer, tokens: list[str]) -> None:
    server = start_server(*SYNTHETIC, *tokens)
    async with connected(server.address) as api:
        every = rollout_pb2.AbortRequest(all=True)
        one = rollout_pb2.AbortRequest(sequences=[rollout_pb2.SequenceKey(request_id="a")])
        await api.rollouts.Abort(one, metadata=bearer(ROLLOUT), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.rollouts.Abort(every, metadata=bearer(ROLLOUT), timeout=60)
        assert reason_of(caught.value) == "PERMISSION_DENIED"
        await api.rollouts.Abort(every, metadata=bearer(CONTROL), timeout=60)


async def test_a_token_that_changes(
    start_server: StartServer, tokens: list[str], tmp_path: Path
) -> None:
    server = start_server(*SYNTHETIC, *tokens)
    async with connected(server.address) as api:
        info = rollout_pb2.GetServerInfoRequest()
        await api.rollouts.GetServerInfo(info, metadata=bearer(ROLLOUT), timeout=60)
        (tmp_path / "new").write_text("another")
        (tmp_path / "new").replace(tmp_path / "rollout")
        await api.rollouts.GetServerInfo(info, metadata=bearer("another"), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.rollouts.GetServerInfo(info, metadata=bearer(ROLLOUT), timeout=60)
        assert reason_of(caught.value) == "UNAUTHENTICATED"
        # The last one counts.
        (tmp_path / "rollout").write_text("\n")  # as whoever writes a file leaves it for a moment
        for _ in range(3):
            await api.rollouts.GetServerInfo(info, metadata=bearer("another"), timeout=60)
        (tmp_path / "rollout").unlink()
        for _ in range(3):
            await api.rollouts.GetServerInfo(info, metadata=bearer("another"), timeout=60)
        (tmp_path / "rollout").write_text("third")
        await api.rollouts.GetServerInfo(info, metadata=bearer("third"), timeout=60)
    events = [json.loads(line) for line in server.log.read_text().splitlines()]
    problems = [told["error"] for told in events if told["event"].startswith("token file cannot")]
    assert problems == ["it is empty", "No such file or directory"]


async def test_tokens_that_become_the_same_do_not_count(
    start_server: StartServer, tokens: list[str], tmp_path: Path
) -> None:
    """Else whoever may sample could change the weights."""
    server = start_server(*SYNTHETIC, *tokens)
    rollout, control = "/rollwire.v1.RolloutService/GetServerInfo", SCHEMA
    async with grpc.aio.insecure_channel(server.address) as channel:

        def renew(name: str, token: str) -> None:
            (tmp_path / "new").write_text(token)
            (tmp_path / "new").replace(tmp_path / name)

        for name, token in (("control", f"{ROLLOUT}\n"), ("rollout", CONTROL)):
            renew(name, token)
            for _ in range(3):
                assert await reason(channel, control, ROLLOUT) == "PERMISSION_DENIED"
                assert await reason(channel, rollout, ROLLOUT) == ""
                assert await reason(channel, control, CONTROL) == ""
            renew(name, {"control": CONTROL, "rollout": ROLLOUT}[name])
            assert await reason(channel, rollout, ROLLOUT) == ""
        renew("control", "third")
        assert await reason(channel, control, "third") == ""
        assert await reason(channel, control, CONTROL) == "UNAUTHENTICATED"
    events = [json.loads(line) for line in server.log.read_text().splitlines()]
    problems = [told["error"] for told in events if told["event"].startswith("tokens cannot")]
    assert len(problems) == 2
    assert all("are the same" in problem for problem in problems)


def secure(address: str, authority: Authority, own: Certificate | None = None) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        root_certificates=authority.certificate.read_bytes(),
        private_key=own.key.read_bytes() if own else None,
        certificate_chain=own.certificate.read_bytes() if own else None,
    )
    # How long a handshake may take, on a machine that is busy with other things.
    options = [("grpc.min_reconnect_backoff_ms", 120_000)]
    return grpc.aio.secure_channel(address, credentials, options=options)


async def served(channel: grpc.aio.Channel) -> bool:
    """Whether a sequence can be had over a channel."""
    try:
        async with channel:
            return (await generate(Api(channel), request((1,), 3))).reason == "LENGTH"
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False


async def test_tls_with_a_certificate_that_changes(
    start_server: StartServer, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    own = old.sign("server")
    server = start_server(
        *SYNTHETIC, "--tls-cert", str(own.certificate), "--tls-key", str(own.key),
        "--health-listen", "127.0.0.1:0",
    )  # fmt: skip
    assert await served(secure(server.address, old))
    assert not await served(secure(server.address, new))
    assert not await served(grpc.aio.insecure_channel(server.address))
    async with secure(server.address, old) as channel:
        api = Api(channel)
        await Update(api, await random_weights(api, 1), 1).publish()
    renewed = new.sign("renewed")
    renewed.key.replace(own.key)
    renewed.certificate.replace(own.certificate)
    assert await served(secure(server.address, new))
    assert not await served(secure(server.address, old))
    # Probes need neither.
    assert await ready(server.listens("health_listen"))


async def test_mutual_tls(start_server: StartServer, tmp_path: Path) -> None:
    authority, strangers = Authority(tmp_path), Authority(tmp_path, "strangers")
    own = authority.sign("server")
    server = start_server(
        *SYNTHETIC, "--tls-cert", str(own.certificate), "--tls-key", str(own.key),
        "--tls-client-ca", str(authority.certificate), "--health-listen", "127.0.0.1:0",
    )  # fmt: skip
    assert await served(secure(server.address, authority, authority.sign("trainer")))
    assert not await served(secure(server.address, authority))
    assert not await served(secure(server.address, authority, strangers.sign("stranger")))
    assert await ready(server.listens("health_listen"))


async def test_the_health_port_serves_nothing_else(start_server: StartServer) -> None:
    server = start_server(*SYNTHETIC, "--health-listen", "127.0.0.1:0")
    address = server.listens("health_listen")
    async with grpc.aio.insecure_channel(address) as channel:
        for stub, method in (
            (rollout_pb2_grpc.RolloutServiceStub(channel), "GetServerInfo"),
            (weights_pb2_grpc.WeightServiceStub(channel), "GetWeightStatus"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(stub, method)(rollout_pb2.GetServerInfoRequest(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rollout-token-file", "token"], "--control-token-file"),
        (["--control-token-file", "nowhere"], "cannot read"),
        (["--control-token-file", "empty"], "it is empty"),
        (["--rollout-token-file", "token", "--control-token-file", "token"], "are the same"),
        (["--control-token-file", "token", "--listen", "0.0.0.0:0"], "unencrypted"),
        (["--tls-cert", "token"], "--tls-key"),
        (["--tls-client-ca", "token"], "needs both"),
        (["--tls-cert", "token", "--tls-key", "nowhere"], "cannot read"),
        (["--tls-cert", "token", "--tls-key", "token"], "no certificate and key"),
    ],
)
def test_settings_that_leave_a_door_open(
    start_server: StartServer, tmp_path: Path, flags: list[str], said: str
) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "empty").write_text("\n")
    files = {"token", "nowhere", "empty"}
    words = [str(tmp_path / flag) if flag in files else flag for flag in flags]
    with pytest.raises(pytest.fail.Exception) as caught:
        start_server(*SYNTHETIC, *words)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
