"""What a server's errors become: the errors of this library."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import grpc
from rollwire.reasons import ErrorDetails, ErrorScope, Reason, decode_details

from rollwire_client._errors import (
    DigestMismatchError,
    FrozenError,
    InvalidRequestError,
    NotFiniteError,
    PrefixMismatchError,
    QueueFullError,
    RefusedError,
    RollwireError,
    ServerFailedError,
    ServerNotReadyError,
    ServerUnreachableError,
    StaleAttemptError,
    StalePublisherError,
    StepFailedError,
    TimedOutError,
    TransferError,
    UpdateRefusedError,
    WeightVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire.v1 import rollout_pb2

_CLASSES: Mapping[Reason, type[RollwireError]] = {
    Reason.EMPTY_PROMPT: InvalidRequestError,
    Reason.TOKEN_OUT_OF_RANGE: InvalidRequestError,
    Reason.CONTEXT_EXCEEDED: InvalidRequestError,
    Reason.BAD_SAMPLING: InvalidRequestError,
    Reason.UNSUPPORTED_LOGPROB_BASIS: InvalidRequestError,
    Reason.UNSUPPORTED_ROUTING: InvalidRequestError,
    Reason.BAD_REQUEST: InvalidRequestError,
    Reason.UNAUTHENTICATED: RefusedError,
    Reason.PERMISSION_DENIED: RefusedError,
    Reason.TOO_MANY_STREAMS: QueueFullError,
    Reason.TOO_MANY_CALLS: QueueFullError,
    Reason.STALE_ATTEMPT: StaleAttemptError,
    Reason.PREFIX_MISMATCH: PrefixMismatchError,
    Reason.REQUEST_MISMATCH: RefusedError,
    Reason.WEIGHTS_TOO_OLD: WeightVersionError,
    Reason.WEIGHTS_TOO_NEW: WeightVersionError,
    Reason.TIMED_OUT: TimedOutError,
    Reason.INTERNAL: ServerFailedError,
    Reason.ENGINE_FAILED: ServerFailedError,
    Reason.NO_MEMORY: ServerFailedError,
    Reason.NOT_FINITE: NotFiniteError,
    Reason.STEP_FAILED: StepFailedError,
    Reason.QUEUE_FULL: QueueFullError,
    Reason.STARTING: ServerNotReadyError,
    Reason.DRAINING: ServerNotReadyError,
    Reason.SLEEPING: ServerNotReadyError,
    Reason.AWAITING_WEIGHTS: ServerNotReadyError,
    Reason.QUARANTINED: ServerNotReadyError,
    Reason.UNSUPPORTED_SLEEP: RefusedError,
    Reason.FROZEN: FrozenError,
    Reason.STALE_PUBLISHER: StalePublisherError,
    Reason.UPDATE_IN_PROGRESS: UpdateRefusedError,
    Reason.NOT_STAGED: UpdateRefusedError,
    Reason.VERSION_NOT_NEWER: UpdateRefusedError,
    Reason.VERSION_CONFLICT: UpdateRefusedError,
    Reason.BASE_MISMATCH: UpdateRefusedError,
    Reason.MANIFEST_MISMATCH: UpdateRefusedError,
    Reason.UNSUPPORTED_ENCODING: UpdateRefusedError,
    Reason.STAGING_FAILED: UpdateRefusedError,
    Reason.COMMIT_FAILED: UpdateRefusedError,
    Reason.DIGEST_MISMATCH: DigestMismatchError,
    Reason.TRANSPORT_FAILED: TransferError,
    Reason.TRANSPORT_TIMEOUT: TransferError,
}
if missing := set(Reason) - set(_CLASSES):
    raise AssertionError(f"add an exception for these reasons: {missing}")

# What an error without a known reason becomes, such as one of a proxy, or of a later release.
_BY_CODE: Mapping[int, tuple[type[RollwireError], ErrorScope]] = {
    code.value[0]: error
    for code, error in {
        grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequestError, ErrorScope.SEQUENCE),
        grpc.StatusCode.NOT_FOUND: (RefusedError, ErrorScope.SEQUENCE),
        grpc.StatusCode.ALREADY_EXISTS: (RefusedError, ErrorScope.SEQUENCE),
        grpc.StatusCode.PERMISSION_DENIED: (RefusedError, ErrorScope.CONFIGURATION),
        grpc.StatusCode.UNAUTHENTICATED: (RefusedError, ErrorScope.CONFIGURATION),
        grpc.StatusCode.FAILED_PRECONDITION: (RefusedError, ErrorScope.SEQUENCE),
        grpc.StatusCode.OUT_OF_RANGE: (RefusedError, ErrorScope.SEQUENCE),
        grpc.StatusCode.UNIMPLEMENTED: (RefusedError, ErrorScope.CONFIGURATION),
        grpc.StatusCode.DEADLINE_EXCEEDED: (TimedOutError, ErrorScope.SEQUENCE),
        grpc.StatusCode.UNAVAILABLE: (ServerUnreachableError, ErrorScope.SERVER),
        # By the other end, which shuts down.
        grpc.StatusCode.CANCELLED: (ServerUnreachableError, ErrorScope.SERVER),
    }.items()
}
_OTHERWISE = ServerFailedError, ErrorScope.SERVER

_FAILED = "failed to connect to all addresses; last error: "
# As in "UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused".
_STATUS = re.compile(r"^[A-Z_]+: ")
_TRIED = re.compile(r"^ipv[46]:\S+:(?P<port>\d+): ")

_SILENT = "what listens there does not answer: check the port, and whether the server hangs"
# Advice for what gRPC says of a failed connection, by a part of that; the first that fits counts.
_ADVICE = {
    "HTTP proxy returned": "the proxy refuses it: leave use_proxy out, or name it in no_proxy",
    "Connection refused": "nothing listens there",
    "certificate has expired": "renew the server's certificate",
    "CERTIFICATE_VERIFY_FAILED": (
        "the server's certificate is not signed by the authority given: check Credentials(ca=…) "
        "or --tls-ca"
    ),
    "Hostname Verification": (
        "the server's certificate is for another name: give Credentials(server_name=…) or "
        "--tls-server-name"
    ),
    "WRONG_VERSION_NUMBER": "TLS is not spoken there: connect without it, or to another port",
    "Failed parsing HTTP/2": "no gRPC server listens there: check the port",
    "timed out": _SILENT,
    "Endpoint closing": _SILENT,  # by this side, as the TLS handshake took too long
    "errors resolving": "check the name and the DNS",
    "DNS resolution failed": "check the name and the DNS",
}
# A server that wants TLS, or a client's certificate, closes the connection without a word.
_CLOSED = (
    "it closed the connection at once: it may want TLS, Credentials(ca=…) or --tls-ca; or a "
    "client's certificate that it trusts, Credentials(certificate=…, key=…) or --tls-cert and "
    "--tls-key"
)


def error_from_call(error: grpc.aio.AioRpcError, server: str) -> RollwireError:
    message = error.details() or error.code().name
    details = decode_details(error.trailing_metadata() or ())
    fields = "".join(
        f"; {field}: {what}" for field, what in details.violations.items() if what not in message
    )
    return _make(error.code().value[0], f"{message}{fields}", server, details)


def error_from_sequence(error: rollout_pb2.SequenceError, server: str) -> RollwireError:
    details = ErrorDetails(reason=error.reason, metadata=dict(error.metadata))
    if error.HasField("retry_delay"):
        details.retry_after = error.retry_delay.ToTimedelta().total_seconds()
    if error.field:
        details.violations = {error.field: error.message}
    return _make(error.code, error.message, server, details)


def _make(code: int, message: str, server: str, details: ErrorDetails) -> RollwireError:
    if details.reason in Reason.__members__:
        reason = Reason[details.reason]
        kind, scope = _CLASSES[reason], reason.scope
    else:
        kind, scope = _BY_CODE.get(code, _OTHERWISE)
    if kind is ServerUnreachableError:
        message = f"cannot be reached: {_explain(message, server)}"
    suffix = f" ({details.reason})" if details.reason else ""
    error = kind(
        f"{server}: {message}{suffix}",
        server=server,
        reason=details.reason,
        retry_after=details.retry_after,
        violations=details.violations,
        metadata=details.metadata,
    )
    error.scope = scope
    return error


def _explain(details: str, server: str) -> str:
    """What gRPC says of a call that found no server, with the address that was tried and advice."""
    refused = details.startswith(_FAILED)
    cause = _STATUS.sub("", details.removeprefix(_FAILED)).removesuffix(": OK")
    tried = _TRIED.match(cause)
    if tried is not None and tried["port"] != server.rpartition(":")[2]:
        cause = f"through the environment's proxy: {cause}"
    for part, advice in _ADVICE.items():
        if part in cause:
            return f"{cause} ({advice})"
    if refused and ("closed" in cause or "reset" in cause):
        return f"{cause} ({_CLOSED})"
    return cause
