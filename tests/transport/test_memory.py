"""How much memory is free, as a container sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_transport import _memory, free_memory

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize(("limit", "free"), [("100", 70), ("max", None)])
def test_files_that_a_container_has_read_are_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, free: int | None
) -> None:
    """Checkpoints and data sets fill what is left of a container's limit."""
    (tmp_path / "memory.max").write_text(f"{limit if free is None else int(limit) * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{95 * MIB}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {30 * MIB}\nfile {65 * MIB}\nactive_file {25 * MIB}\ninactive_file {40 * MIB}\n"
    )
    monkeypatch.setattr(_memory, "_CONTAINER", tmp_path)
    found = free_memory(torch.device("cpu"))
    assert found == free * MIB if free is not None else found > 100 * MIB
