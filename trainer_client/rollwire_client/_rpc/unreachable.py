"""Why a connection to a server fails, and what to do about it, from what gRPC says."""

from __future__ import annotations

import re

_FAILED = "failed to connect to all addresses; last error: "
# As in "UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused".
_STATUS = re.compile(r"^[A-Z_]+: ")
_TRIED = re.compile(r"^ipv[46]:\S+:(?P<port>\d+): ")

_SILENT = "what listens there does not answer: check the port, and whether the server hangs"
# What gRPC's words for a failed connection mean, by a part of them; the first that fits counts.
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


def explain(details: str, server: str) -> str:
    """What gRPC says of a call that found no server, with the address that was tried and advice.

    Args:
        details: Those of the call's status.
        server: Its address.
    """
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
