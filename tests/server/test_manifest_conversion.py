"""A manifest is the same after the way from the trainer to the server."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rollwire_client._rpc.conversion import manifest_to_proto
from rollwire_server.rpc.validation import manifest_from_proto
from rollwire_transport import Encoding, describe_all, plan

TENSORS = {"w": torch.zeros(5, 7, dtype=torch.bfloat16), "b": torch.zeros(())}
FULL = plan(describe_all({**TENSORS, "tied": TENSORS["w"]}), bucket_bytes=64)


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("base_digest", [None, 0, 7])
def test_every_field_arrives(encoding: Encoding, base_digest: int | None) -> None:
    manifest = replace(FULL, encoding=encoding, partial=True, base_digest=base_digest)
    assert manifest_from_proto(manifest_to_proto(manifest)) == manifest
