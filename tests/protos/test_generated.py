"""The committed API code is what its .proto files and the pinned generator make."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import __version__ as protobuf_version
from rollwire.v1 import common_pb2, rollout_pb2

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    int(protobuf_version.split(".")[0]) >= 7, reason="the pinned generator needs protobuf 6"
)
def test_generated_code_is_current(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "generate_protos.py"
    environment = {"PATH": str(Path(sys.executable).parent)}
    subprocess.run(
        [sys.executable, script, "--out", tmp_path], check=True, env=environment, timeout=240
    )
    made = sorted(p.name for p in (tmp_path / "rollwire/v1").iterdir())
    committed = ROOT / "protos/rollwire/v1"
    assert made == sorted(p.name for p in committed.glob("*_pb2*"))
    _, differ, missing = filecmp.cmpfiles(tmp_path / "rollwire/v1", committed, made, shallow=False)
    assert not differ
    assert not missing


def test_absent_version_differs_from_zero() -> None:
    untagged, zero = common_pb2.WeightTag(), common_pb2.WeightTag(version=0)
    assert not untagged.HasField("version")
    assert zero.HasField("version")
    assert untagged.SerializeToString() != zero.SerializeToString()


def test_columns_stay_packed() -> None:
    """A token in columns costs an id and four bytes, not a tag each."""
    message = rollout_pb2.StreamRolloutsResponse(token_ids=[1] * 1000, logprobs=[-1.0] * 1000)
    assert len(message.SerializeToString()) < 5 * 1000 + 20
