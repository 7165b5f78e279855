"""Numbers that cannot be meant are refused where they are given, by their names."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from client.publishing import publishing
from client.scripted_weights import policy
from rollwire_client import (
    Batcher,
    Fleet,
    InvalidRequestError,
    KvPolicy,
    Publisher,
    PublishTimeouts,
    Timeouts,
)
from rollwire_client._arguments import checked_version, integer, number
from rollwire_client._cli.app import run
from rollwire_client.sync import SyncFleet
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable

NO_NUMBERS: list[Any] = ["1", None, True, [1], 1j]
NO_TIMES: list[Any] = [math.nan, math.inf, -math.inf, -1, -0.001, 1e300, 10**400, *NO_NUMBERS]


@pytest.mark.parametrize("value", NO_TIMES, ids=repr)
@pytest.mark.parametrize("kind", [PublishTimeouts, Timeouts])
def test_no_wait_lasts_for_what_is_no_time(kind: type[Any], value: object) -> None:
    for field in dataclasses.fields(kind):
        with pytest.raises((TypeError, ValueError), match=rf"^{kind.__name__}\.{field.name} is "):
            kind(**{field.name: value})


@pytest.mark.parametrize("value", [*NO_TIMES, 0], ids=repr)
@pytest.mark.parametrize("name", ["probe_interval", "resolve_interval"])
@pytest.mark.parametrize("fleet", [Fleet, SyncFleet])
def test_a_fleet_asks_at_real_intervals(fleet: type[Any], name: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} is "):
        fleet(["127.0.0.1:1"], **{name: value})


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["info --timeout", "top --interval"])
def test_a_command_refuses_what_is_no_time(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, name = option.split()
    assert run([command, "127.0.0.1:1", name, value]) == 2
    assert f"Invalid value for '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"term": -1}, "term is -1, not an integer from 0 to 18446744073709551615"),
        ({"term": 1 << 64}, "term is 18446744073709551616, not"),
        ({"term": 1.5}, "term is 1.5, not"),
        ({"term": True}, "term is True, not"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0, not an integer from 64 to 1073741824"),
        ({"bucket_bytes": math.nan}, "bucket_bytes is nan, not"),
        ({"bucket_bytes": 100}, "bucket_bytes is 100, not a multiple of 64"),
        ({"bucket_bytes": 1 << 40}, "bucket_bytes is 1099511627776, not"),
        ({"full_every": 0}, "full_every is 0, not"),
        ({"full_every": "10"}, "full_every is '10', not"),
        ({"timeouts": 5}, r"timeouts is 5: use for example PublishTimeouts\("),
        ({"timeouts": Timeouts()}, r"use for example PublishTimeouts\("),
        ({"kv_policy": "keep"}, "kv_policy is 'keep', not a KvPolicy"),
        ({"max_kv_lag": -1}, "max_kv_lag is -1, not an integer from 0 to 4294967295"),
        ({"max_kv_lag": 1 << 32}, "max_kv_lag is 4294967296, not"),
        (
            {"kv_policy": KvPolicy.RECOMPUTE, "max_kv_lag": 0},
            "max_kv_lag is 0, but KvPolicy.RECOMPUTE keeps no keys and values",
        ),
    ],
)
def test_what_a_publisher_is_made_with_is_checked(options: dict[str, Any], told: str) -> None:
    fleet = Fleet(["127.0.0.1:1"])
    with pytest.raises((TypeError, ValueError), match=told):
        Publisher(fleet, **options)


async def test_what_to_do_with_keys_and_values_is_checked_before_anything_is_sent() -> None:
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(TypeError, match="kv_policy is 'keep', not a KvPolicy"):
            await publisher.publish(1, policy(), kv_policy="keep")
        with pytest.raises(ValueError, match=r"max_kv_lag is 2, but KvPolicy\.RECOMPUTE"):
            await publisher.publish(1, policy(), kv_policy=KvPolicy.RECOMPUTE, max_kv_lag=2)
        assert servers[0].update is None


@pytest.mark.parametrize(
    ("check", "value", "checked"),
    [
        (number, 0, 0.0),
        (number, np.float32(0.5), 0.5),
        (number, np.int64(3), 3.0),
        (integer, np.int64(3), 3),
        (integer, 1 << 80, 1 << 80),
    ],
)
def test_numbers_may_be_of_any_type(
    check: Callable[[str, object], float], value: object, checked: float
) -> None:
    assert check("n", value) == checked
    assert type(check("n", value)) is type(checked)


NO_VERSIONS: list[Any] = [-1, -(1 << 63), 1 << 63, True, False, 1.0, "1", math.nan]


@pytest.mark.parametrize("wrong", NO_VERSIONS, ids=repr)
async def test_what_is_no_version_is_refused_before_anything_is_sent(wrong: Any) -> None:
    told = r"^version is .*, not a version: an integer from 0 to 2\^63 - 1"
    refused = pytest.raises((TypeError, ValueError), match=told)
    async with publishing(1) as (servers, fleet, publisher), Batcher(fleet, seed=1) as batcher:
        with refused:
            await publisher.publish(wrong, policy())
        with refused:
            await batcher.collect([], 1, version=wrong)
        with refused:
            await batcher.evaluate([], version=wrong)
        for bound in ("min_weight_version", "max_weight_version"):
            with pytest.raises(InvalidRequestError, match=f"^{bound} is .*, not a version"):
                await fleet.generate([1], **{bound: wrong})
        assert (servers[0].announced, servers[0].requests) == (0, [])
    with refused:
        FakeServer(version=wrong)
    with refused:
        FakeServer().commit(wrong)


@pytest.mark.parametrize("right", [0, (1 << 63) - 1, np.int8(5), torch.tensor(7), None])
def test_versions_may_be_of_any_type(right: Any) -> None:
    checked = checked_version("version", right)
    assert checked == right
    assert type(checked) in {int, type(None)}
