"""The life of a server in a fleet, from its first mention in the list to its closed channel.

    joining ─▶ ready ◀─▶ behind, resting, suspect        as it answers, and fails
                 └──────────┴──▶ leaving ─▶ gone         as the list of addresses has it

Only a ready server gets sequences. One that is leaving keeps those that it has.
"""

from __future__ import annotations

import enum


class Life(enum.Enum):
    """Where a server is in it."""

    JOINING = "joining"
    """In the list; it has not said yet how it is."""
    READY = "ready"
    """Gets sequences."""
    BEHIND = "behind"
    """Serves other weights than the fleet's policy: it missed a publish."""
    RESTING = "resting"
    """Answers, and serves nothing now: it starts, awaits weights, sleeps, drains, …"""
    SUSPECT = "suspect"
    """A sequence failed there, or it did not answer: it is asked again."""
    LEAVING = "leaving"
    """Not in the list any more; what it has under way goes on."""
    GONE = "gone"
    """Its channel is closed. Under the same address a new life begins."""


class Event(enum.Enum):
    """What happens to a server."""

    SERVES = "it says that it serves the fleet's policy"
    LAGS = "it says that it serves other weights"
    RESTS = "it says that it serves nothing now"
    FAILED = "a sequence failed there, or it did not answer"
    LISTED = "its address is in the list"
    UNLISTED = "its address is not in the list"
    UNUSED = "nothing is under way there"


_LISTED = {
    Event.SERVES: Life.READY,
    Event.LAGS: Life.BEHIND,
    Event.RESTS: Life.RESTING,
    Event.FAILED: Life.SUSPECT,
    Event.UNLISTED: Life.LEAVING,
}

TRANSITIONS = {
    Life.JOINING: _LISTED,
    Life.READY: _LISTED,
    Life.BEHIND: _LISTED,
    Life.RESTING: _LISTED,
    Life.SUSPECT: _LISTED,
    Life.LEAVING: {Event.LISTED: Life.JOINING, Event.UNUSED: Life.GONE},
    Life.GONE: {},
}
"""What follows; an event that a life has no entry for changes nothing."""
