"""Who may call the gateway: two bearer tokens, as on the servers' API."""

from __future__ import annotations

import hmac
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from rollwire.credentials import WatchedFiles

from rollwire_client._gateway.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)


class BearerTokens:
    """The rollout token samples and aborts requests by name; the control token may do everything.
    Files are read again when they change.

    Raises:
        OSError, ValueError: A file cannot be used, or the tokens protect too little.
    """

    def __init__(self, rollout: Path | None, control: Path | None) -> None:
        if rollout is not None and control is None:
            raise ValueError(
                "--rollout-token-file alone would leave weight updates open to all: give "
                "--control-token-file too"
            )
        self._rollout = None if rollout is None else WatchedFiles(rollout)
        self._control = None if control is None else WatchedFiles(control)
        tokens = [_token(file) for file in (self._rollout, self._control) if file is not None]
        if len(set(tokens)) < len(tokens):
            raise ValueError("the rollout token and the control token are the same: use two")

    @property
    def used(self) -> bool:
        return self._control is not None

    def authorize(self, headers: Mapping[str, str], *, control: bool) -> None:
        """Raises HttpError if these headers do not permit the call."""
        for file in (self._rollout, self._control):
            if file is not None:
                _refresh(file)
        needed = self._control if control else self._rollout
        if needed is None:
            _refuse_other_sites(headers)
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip().encode() if kind.lower() == "bearer" else b""
        if _matches(self._control, token):
            return
        if not _matches(self._rollout, token):
            raise HttpError(
                HTTPStatus.UNAUTHORIZED,
                "this call needs a token: send the header 'Authorization: Bearer TOKEN'",
                code="invalid_api_key",
            )
        if control:
            raise HttpError(
                HTTPStatus.FORBIDDEN,
                "this call needs the control token, not the rollout one",
                code="permission_denied",
            )


def _refuse_other_sites(headers: Mapping[str, str]) -> None:
    """Where no token is needed, a page that somebody reads beside the gateway must not use it:
    browsers send its requests without asking, and only keep the answers from it.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    own = origin is None or origin.partition("://")[2] == headers.get("host")
    if not own or site in {"cross-site", "same-site"}:
        raise HttpError(
            HTTPStatus.FORBIDDEN,
            "a web page of another site sent this: it needs a token (--rollout-token-file, "
            "--control-token-file)",
            code="other_site",
        )


def _token(file: WatchedFiles) -> bytes:
    return file.contents[0].strip()


def _matches(file: WatchedFiles | None, token: bytes) -> bool:
    return file is not None and hmac.compare_digest(_token(file), token)


def _refresh(file: WatchedFiles) -> None:
    try:
        if file.refresh():
            logger.info("a token file was read again")
    except (OSError, ValueError) as error:
        logger.warning("a token file cannot be used, the last token counts: %s", error)
