"""How long a client waits for a server."""

from __future__ import annotations

from dataclasses import dataclass

from rollwire_client._arguments import all_seconds

# Seconds for a server to fall asleep or wake up: it moves its weights, or loads a checkpoint.
SLEEP_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a client waits for a server, in seconds.

    Time in which the event loop did not run does not count: nothing can be received then.

    Attributes:
        start: When a fleet is opened: until the first of its servers has loaded its model.
        call: For the answer to a call.
        silence: The server is probed after this long without a message for live sequences.
        probe: For the answer to a probe; after that the stream counts as lost.
        close: For the server to end the sequences that a closing client aborts.

    Raises:
        TypeError, ValueError: A value is not a number of seconds.
    """

    start: float = 60.0
    call: float = 10.0
    silence: float = 5.0
    probe: float = 5.0
    close: float = 2.0

    def __post_init__(self) -> None:
        all_seconds(self)


def checked_timeouts(timeouts: Timeouts | None) -> Timeouts:
    if not isinstance(timeouts, Timeouts | None):
        raise TypeError(f"timeouts is {timeouts!r}: use for example Timeouts(call={timeouts!r})")
    return timeouts or Timeouts()
