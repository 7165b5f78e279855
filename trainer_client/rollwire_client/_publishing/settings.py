"""How a publisher publishes: the same for each of its updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_client._arguments import all_seconds

if TYPE_CHECKING:
    from rollwire.types import KvPolicy
    from rollwire.v1 import weights_pb2


@dataclass(frozen=True, slots=True)
class PublishTimeouts:
    """How long a publish waits, in seconds.

    Time in which the event loop did not run does not count for waits for servers and other ranks,
    because nothing can be received then.

    Attributes:
        call: For the answer to a short call.
        ready: For a server to check an update and to reserve memory for it.
        silence: A server that reports nothing for this long is left out of the publish; servers
            report at least every half second.
        join: For a transport group to form.
        bucket: For one bucket to reach all servers.
        source: For the trainer to provide the tensors of one bucket. Servers by default wait 30 s
            for a bucket.
        stalled: For the servers to report what they have received, after a group failed.
        staged: For the servers to verify the update, once everything is sent.
        commit: For a server to put an update in place.
        commit_silence: For the answer to a commit, before the server is probed.
        discard: For the answer to a discard; a server that does not answer discards the update when
            its lease ends.
        stage_lease: How long a server keeps an update (announced, stalled or staged) whose
            publisher is gone.

    Raises:
        TypeError, ValueError: A value is not a number of seconds.
    """

    call: float = 10.0
    ready: float = 30.0
    silence: float = 5.0
    join: float = 20.0
    bucket: float = 30.0
    source: float = 20.0
    stalled: float = 2.0
    staged: float = 30.0
    commit: float = 60.0
    commit_silence: float = 5.0
    discard: float = 5.0
    stage_lease: float = 120.0

    def __post_init__(self) -> None:
        all_seconds(self)


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """The arguments of a ``Publisher``, checked; ``publisher`` is its id and term."""

    publisher: weights_pb2.Publisher
    backend: str | None
    host: str | None
    kv_policy: KvPolicy
    bucket_bytes: int | None
    timeouts: PublishTimeouts
