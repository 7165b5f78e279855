"""Who may call: TLS and bearer tokens, from files that are reloaded when they change."""

from __future__ import annotations

import enum
import hmac
import ssl
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health
from rollwire.credentials import WatchedFiles, is_loopback
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2, weights_pb2

from rollwire_server.errors import ServiceError
from rollwire_server.settings import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rollwire_server.settings import ServerSettings

    Metadata = Iterable[tuple[str, str | bytes]]

log = structlog.get_logger()


class Scope(enum.Enum):
    """What a call needs a token for; the control token opens rollout calls too."""

    OPEN = "open"
    ROLLOUT = "rollout"
    CONTROL = "control"


_ROLLOUT_SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
_WEIGHT_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightService"]
_ROLLOUT_CALLS = {"Generate", "StreamRollouts", "Abort", "GetServerInfo"}

# By full method name.
SCOPES: dict[str, Scope] = {
    f"/{service.full_name}/{method.name}": (
        Scope.ROLLOUT if method.name in _ROLLOUT_CALLS else Scope.CONTROL
    )
    for service in (_ROLLOUT_SERVICE, _WEIGHT_SERVICE)
    for method in service.methods
}


def scope_of(method: str) -> Scope:
    if method.startswith(f"/{health.SERVICE_NAME}/"):
        return Scope.OPEN
    return SCOPES.get(method, Scope.ROLLOUT)  # such as reflection


class TokenAuthorizer:
    """Raises StartError when tokens would travel unencrypted, or protect too little."""

    def __init__(self, settings: ServerSettings) -> None:
        paths = {
            Scope.ROLLOUT: settings.rollout_token_file,
            Scope.CONTROL: settings.control_token_file,
        }
        self._files = {scope: _watch(path) for scope, path in paths.items() if path is not None}
        if Scope.ROLLOUT in self._files and Scope.CONTROL not in self._files:
            raise StartError(
                "--rollout-token-file alone would leave weight updates open to all: give "
                "--control-token-file too"
            )
        self._tokens = self._read_tokens()
        if self._files and settings.tls_cert is None and not is_loopback(settings.listen):
            raise StartError(
                f"tokens would travel unencrypted to {settings.listen}: give --tls-cert and "
                "--tls-key, or listen on a loopback address"
            )

    def authorize(self, scope: Scope, metadata: Metadata) -> None:
        if scope is Scope.OPEN or scope not in self._files:
            return
        self._refresh()
        given = _bearer(metadata)
        if self._matches(Scope.CONTROL, given):
            return
        if not self._matches(Scope.ROLLOUT, given):
            raise ServiceError(
                Reason.UNAUTHENTICATED,
                f"this call needs a {scope.value} token: send metadata "
                "'authorization: Bearer TOKEN'",
            )
        if scope is Scope.CONTROL:
            raise ServiceError(
                Reason.PERMISSION_DENIED, "this call needs the control token, not the rollout one"
            )

    def _matches(self, scope: Scope, given: bytes) -> bool:
        token = self._tokens.get(scope)
        return token is not None and hmac.compare_digest(token, given)

    def _refresh(self) -> None:
        changed = []
        for scope, file in self._files.items():
            try:
                if file.refresh():
                    changed.append(scope.value)
            except OSError as error:
                log.warning(
                    "token file cannot be used: the last one counts",
                    scope=scope.value,
                    error=error.strerror,
                )
        if not changed:
            return
        try:
            self._tokens = self._read_tokens()
        except StartError as error:
            log.warning("tokens cannot be used: the last ones count", error=str(error))
        else:
            log.info("tokens read again", scopes=changed)

    def _read_tokens(self) -> dict[Scope, bytes]:
        tokens = {scope: file.contents[0].strip() for scope, file in self._files.items()}
        if len(set(tokens.values())) < len(tokens):
            raise StartError(
                "the rollout token and the control token are the same, so that every client that "
                "may sample could change the weights: use two different tokens"
            )
        return tokens


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    if settings.tls_cert is None or settings.tls_key is None:
        if settings.tls_cert is settings.tls_key is settings.tls_client_ca:
            return None
        raise StartError("--tls-cert and --tls-key belong together, --tls-client-ca needs both")
    files = _watch(settings.tls_key, settings.tls_cert, settings.tls_client_ca, check=_check_pem)

    def configuration() -> grpc.ServerCertificateConfiguration:
        private, chain, ca = files.contents
        return grpc.ssl_server_certificate_configuration(
            [(private, chain)], root_certificates=ca or None
        )

    def changed() -> grpc.ServerCertificateConfiguration | None:
        try:
            if not files.refresh():
                return None
        except (OSError, ValueError) as error:
            log.warning("TLS files cannot be used: the last ones count", error=str(error))
            return None
        log.info("TLS files read again")
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        changed,  # type: ignore[arg-type]  # the stubs lack None: unchanged
        require_client_authentication=settings.tls_client_ca is not None,
    )


def _watch(*paths: Path | None, check: Callable[..., None] = lambda *_: None) -> WatchedFiles:
    try:
        return WatchedFiles(*paths, check=check)
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(str(error)) from error


def _check_pem(key: Path, cert: Path, client_ca: Path | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # never asks on a terminal
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, ValueError) as error:
        named = ", ".join(str(path) for path in (cert, key, client_ca) if path is not None)
        raise ValueError(
            f"no certificate and key that belong together: {named}: {error}"
        ) from error


def _bearer(metadata: Metadata) -> bytes:
    for key, value in metadata:
        if key.lower() == "authorization":
            text = value if isinstance(value, bytes) else value.encode()
            kind, _, token = text.partition(b" ")
            return token.strip() if kind.lower() == b"bearer" else b""
    return b""
