"""Where the files of a checkpoint disagree about its end-of-sequence tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rollwire_server.engines.embedded.checkpoint import build
from support.calls import Api, connected, generate, request
from support.contract import FLAGS
from support.servers import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import ServerProcess

IN_CONFIG, IN_GENERATION_CONFIG = range(60), range(40, 100)
OWN = range(200, 300)


@pytest.fixture(scope="module")
def disagreeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder, engine = tmp_path_factory.mktemp("ends"), request.config.getoption("--engine")
    model = folder / "model"
    build("builtin:tiny").save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [*IN_CONFIG]}))
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [*IN_GENERATION_CONFIG]})
    )
    with servers(folder) as start:
        yield start("--engine", engine, "--model", str(model), *FLAGS[engine])


async def ends(api: Api, stops: range, **fields: object) -> set[int]:
    """The last tokens of some sequences: each ends at the first token of ``stops``."""
    found = set()
    for seed in range(12):
        output = await generate(api, request((3, 1), 200, seed=seed, **fields))
        assert output.reason == "STOP", output.finish
        assert output.finish is not None
        assert output.finish.stop_token_id == output.tokens[-1]
        assert [token in stops for token in output.tokens].index(True) == len(output.tokens) - 1
        found.add(output.tokens[-1])
    return found


async def test_a_sequence_ends_at_whatever_either_names(disagreeing: ServerProcess) -> None:
    async with connected(disagreeing.address) as api:
        assert list((await api.info()).eos_token_ids) == [*range(100)]
        found = await ends(api, range(100))
        assert found - {*IN_CONFIG}
        assert found - {*IN_GENERATION_CONFIG}


async def test_only_the_callers_own_stops_where_those_are_ignored(
    disagreeing: ServerProcess,
) -> None:
    async with connected(disagreeing.address) as api:
        await ends(api, OWN, ignore_eos=True, stop_token_ids=OWN)
