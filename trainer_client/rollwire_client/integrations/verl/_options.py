"""What verl's configuration says about rollwire, in the two places ``engine_kwargs.rollwire``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from rollwire.types import KvPolicy

from rollwire_client._arguments import integer
from rollwire_client._data import PublishTimeouts, checked_share
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._publishing.publisher import Publisher, checked_kv_lag
from rollwire_client._rpc.channel import Credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_client._data import Require

_CREDENTIALS = ("token_file", "tls", "ca", "certificate", "key", "server_name")
_KV_POLICIES = {policy.value: policy for policy in KvPolicy}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Where the servers are, and how they are reached.

    Attributes:
        servers: As ``Fleet`` takes them: a list of HOST:PORT, or ``dns:///NAME:PORT``.
        credentials: As ``Credentials`` takes them.
    """

    servers: list[str] | str
    credentials: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str) -> Self:
        """Reads ``options``; ``where`` they stand is for errors.

        Raises:
            ValueError: There are no servers, or an option does not exist.
        """
        given = dict(options)
        servers = given.pop("servers", None)
        if not servers:
            raise ValueError(f"{where}.servers is missing: the addresses of rollwire's servers")
        credentials = {name: given.pop(name) for name in _CREDENTIALS if name in given}
        if given:
            known = ", ".join(("servers", *_CREDENTIALS))
            raise ValueError(f"{where} has no option {', '.join(given)}; it has {known}")
        return cls(servers if isinstance(servers, str) else [*map(str, servers)], credentials)

    def fleet(self) -> Fleet:
        """A fleet of these servers, not open yet."""
        return Fleet(
            self.servers, credentials=Credentials(**self.credentials) if self.credentials else None
        )


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How policies are published.

    Attributes:
        backend, host, bucket_bytes: As for ``Publisher``.
        kv_policy: "keep" or "recompute", see ``KvPolicy``.
        max_kv_lag, delta: As for ``Publisher``.
        require: Which servers must have a policy before verl goes on; see
            ``PublishReport.require``.
        max_unchanged: How many new versions in a row may have the weights of the one before, as
            while all rewards are equal; None: any number. One more is an error.
        timeouts: Those of ``PublishTimeouts`` that are not the default, in seconds.
    """

    backend: str | None = None
    host: str | None = None
    bucket_bytes: int | None = None
    kv_policy: str = "keep"
    max_kv_lag: int | None = None
    delta: bool = True
    require: Require = "any"
    max_unchanged: int | None = 3
    timeouts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        PublishTimeouts(**self.timeouts)
        if self.max_unchanged is not None:
            integer("max_unchanged", self.max_unchanged)
        checked_share(self.require)
        if self.kv_policy not in _KV_POLICIES:
            raise ValueError(f"kv_policy is {self.kv_policy!r}, not {' or '.join(_KV_POLICIES)}")
        checked_kv_lag(_KV_POLICIES[self.kv_policy], self.max_kv_lag)

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Those of ``options`` that are about publishing, and the others."""
        names = {one.name for one in fields(cls)}
        own = {name: value for name, value in options.items() if name in names}
        return cls(**own), {name: options[name] for name in options if name not in names}

    def publisher(self, fleet: Fleet) -> Publisher:
        """A publisher to this fleet."""
        return Publisher(
            fleet,
            backend=self.backend,
            host=self.host,
            bucket_bytes=self.bucket_bytes,
            kv_policy=_KV_POLICIES[self.kv_policy],
            max_kv_lag=self.max_kv_lag,
            delta=self.delta,
            timeouts=PublishTimeouts(**self.timeouts),
        )
