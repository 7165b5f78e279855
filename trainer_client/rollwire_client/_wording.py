"""Words that several messages share."""

from __future__ import annotations


def update_text(version: int | None) -> str:
    """An update that brings this version."""
    return "an untagged update" if version is None else f"version {version}"


def servers_text(count: int) -> str:
    """How many servers."""
    return "1 server" if count == 1 else f"{count} servers"
