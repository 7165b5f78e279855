from __future__ import annotations

from collections.abc import Iterable  # noqa: TC003 - a dataclass
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - a dataclass

from rollwire_client._batches import buffer_file
from rollwire_client._batches.batch import Group  # noqa: TC001 - a dataclass
from rollwire_client._batches.group_file import read_groups
from rollwire_client._errors import GroupFileError


@dataclass(frozen=True, slots=True)
class Source:
    """What a file holds.

    Attributes:
        groups: Read as they are taken.
        summary: What else is known; may be empty.
    """

    name: str
    groups: Iterable[Group]
    summary: str


def open_source(path: Path) -> Source:
    """The groups of a file; its first bytes tell which kind it is.

    Raises:
        GroupFileError: It is neither kind. ``groups`` raises this too, for a line.
        BufferFileError: It is a buffer that is damaged.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(len(buffer_file.NAME))
    if begin == buffer_file.NAME:
        contents = buffer_file.read(path)
        version = "no version" if contents.version is None else f"version {contents.version}"
        summary = (
            f"buffer of a batcher at {version}; groups handed out before: {contents.handed_out:,}, "
            f"dropped: {contents.dropped:,}"
        )
        return Source(path.name, [group.snapshot() for group in contents.groups], summary)
    if begin.lstrip()[:1] not in {b"{", b""}:
        raise GroupFileError(
            f"{path} is neither a buffer that Batcher.save wrote nor a file that append_groups "
            "wrote: give the path of one of them"
        )
    return Source(path.name, read_groups(path), "")
