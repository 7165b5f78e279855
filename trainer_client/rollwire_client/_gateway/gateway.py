"""What the endpoints share: the fleet, the tokenizer, the limits."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rollwire.types import LogprobBasis

from rollwire_client._data import ServerInfo
from rollwire_client._gateway.errors import HttpError, invalid
from rollwire_client._gateway.fields import shown
from rollwire_client._gateway.sampler import Sampler, SamplerLimits
from rollwire_client._gateway.weights import WeightUpdater

if TYPE_CHECKING:
    from pathlib import Path

    from rollwire_client._fleet.fleet import Fleet
    from rollwire_client._gateway.metrics import GatewayMetrics
    from rollwire_client._gateway.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """How a gateway serves.

    Attributes:
        model_names: Names by which requests may ask for the model; the first is the one that
            answers have. None: what the servers say.
        tokenizer: Folder of the tokenizer; None: endpoints with text are refused.
        renderer: Name of the model's renderer, which finds calls of tools; None: chats with tools
            are refused.
        logprob_basis: The distribution of log-probabilities, where a request names none.
        checkpoints: Folders from which weights may be updated.
        limits: Of the sequences.
        body_bytes: Largest body of a request.
        heartbeat: Seconds of silence after which a stream gets a comment.
    """

    model_names: tuple[str, ...] = ()
    tokenizer: str | None = None
    renderer: str | None = None
    logprob_basis: LogprobBasis = LogprobBasis.TEMPERATURE
    checkpoints: tuple[Path, ...] = ()
    limits: SamplerLimits = field(default_factory=SamplerLimits)
    body_bytes: int = 64 << 20
    heartbeat: float = 10.0


class Gateway:
    """A fleet that is open, and what stands between it and HTTP."""

    def __init__(
        self,
        fleet: Fleet,
        settings: GatewaySettings,
        tokenizer: ChatTokenizer | None,
        metrics: GatewayMetrics,
        model_names: tuple[str, ...],
    ) -> None:
        self._fleet = fleet
        self.heartbeat = settings.heartbeat
        self.body_bytes = settings.body_bytes
        self.model_names = model_names
        self.tokenizer = tokenizer
        self.tokenizer_path = settings.tokenizer
        self.metrics = metrics
        self.sampler = Sampler(fleet, settings.limits, settings.logprob_basis, metrics)
        self.updater = WeightUpdater(fleet, settings.checkpoints, metrics)
        self.started_at = int(time.time())
        self.draining = False

    @property
    def software_version(self) -> str:
        try:
            return version("rollwire")
        except PackageNotFoundError:
            return "unknown"

    def checked_model(self, name: str | None) -> str:
        """The name of the model that a request asks for.

        Raises:
            HttpError: It is not served here.
        """
        if name and name not in self.model_names:
            raise HttpError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {shown(name)}: "
                f"this gateway serves {', '.join(self.model_names)}",
                code="model_not_found",
                param="model",
            )
        return name or self.model_names[0]

    def tokenizer_for(self, what: str) -> ChatTokenizer:
        if self.tokenizer is None:
            raise invalid(
                f"{what} needs a tokenizer, and this gateway has none: start it with --tokenizer, "
                "or send token ids to /inference/v1/generate or /generate",
                code="no_tokenizer",
            )
        return self.tokenizer

    def unready_reason(self) -> str | None:
        """Why it takes no requests; None if it does. At a paused server they wait."""
        if self.draining:
            return "the gateway shuts down"
        servers = self._fleet._pool.servers  # noqa: SLF001 - the library's own
        if any(server.problem is None for server in servers):
            return None
        return f"no server is ready: {self._fleet.unavailable_reason()}"

    async def servers(self) -> list[dict[str, Any]]:
        """What each server says of itself, or why it says nothing."""
        return [
            _server_fields(answer) if isinstance(answer, ServerInfo) else {"error": str(answer)}
            for answer in (await self._fleet.info()).values()
        ]

    async def context_length(self) -> int | None:
        """That of the server with the shortest; None if none answers."""
        infos = (await self._fleet.info()).values()
        return min((i.context_length for i in infos if isinstance(i, ServerInfo)), default=None)

    async def weight_version(self) -> str:
        """The lowest that serves, as text; "default" where weights have none."""
        infos = (await self._fleet.info()).values()
        versions = [i.weights.version for i in infos if isinstance(i, ServerInfo)]
        known = [v for v in versions if v is not None]
        return str(min(known)) if known and len(known) == len(versions) else "default"


def _server_fields(info: ServerInfo) -> dict[str, Any]:
    fields = asdict(info)
    fields["state"] = info.state.value
    fields["weights"]["digest"] = f"{info.weights.digest:016x}"
    fields["logprob_bases"] = sorted(basis.value for basis in info.logprob_bases)
    return fields
