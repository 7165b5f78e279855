"""Updates from a checkpoint folder: all of it is checked, then published as a transaction."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from rollwire_server import builtin_model
from safetensors.torch import load_file, save_file
from support import reference

if TYPE_CHECKING:
    from pathlib import Path

    from support.gateways import StartGateway
    from support.servers import StartServer
    from transformers import PreTrainedModel

PATH = "/update_weights_from_disk"
PROMPT = [5, 6, 7]


def another_policy(folder: Path, *, shards: str = "1GB") -> PreTrainedModel:
    torch.manual_seed(1)
    model = builtin_model("builtin:tiny")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


async def test_a_checkpoint_folder_becomes_the_policy(
    start_server: StartServer, start_gateway: StartGateway, tmp_path: Path
) -> None:
    servers = [start_server(), start_server("--await-weights")]
    gateway = start_gateway(*(s.address for s in servers), "--checkpoints", str(tmp_path))
    model = another_policy(tmp_path / "step_7", shards="100KB")
    ask = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 24, "ignore_eos": True},
        "return_logprob": True,
    }
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        body = {"model_path": str(tmp_path / "step_7"), "weight_version": "7"}
        answer = (await http.post(PATH, json=body)).json()
        assert answer["success"], answer
        assert answer["weight_version"] == "7"
        for _ in servers:
            sampled = (await http.post("/generate", json=ask)).json()
            meta, ids = sampled["meta_info"], sampled["output_ids"]
            assert (meta["weight_version"], meta["weight_versions"]) == ("7", [7] * 24)
            logprobs = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
            expected = reference.logprobs(model, PROMPT, ids)
            assert (logprobs - expected).abs().max() < 1e-5
        assert (await http.get("/model_info")).json()["weight_version"] == "7"
        again = (await http.post(PATH, json={"model_path": body["model_path"]})).json()
        assert again["weight_version"] == "8"


@pytest.mark.parametrize("problem", ["shard", "cut", "nan", "shape", "nothing", "outside"])
async def test_a_folder_that_is_not_whole_changes_nothing(
    start_server: StartServer, start_gateway: StartGateway, tmp_path: Path, problem: str
) -> None:
    server = start_server("--engine", "embedded")
    allowed, folder = tmp_path / "run", tmp_path / "run" / "step_7"
    allowed.mkdir()
    gateway = start_gateway(server.address, "--checkpoints", str(allowed))
    another_policy(folder, shards="100KB")
    spoil(folder, problem)
    path = tmp_path if problem == "outside" else folder
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        before = (await http.get("/server_info")).json()["servers"][0]["weights"]
        response = await http.post(PATH, json={"model_path": str(path)})
        after = (await http.get("/server_info")).json()["servers"][0]["weights"]
    error = response.json()["error"]
    assert response.status_code == (403 if problem == "outside" else 400), error
    codes = {"outside": "folder_not_allowed", "shape": "schema_mismatch_error"}
    assert error["code"] == codes.get(problem, "source_error")
    assert str(path) in error["message"] or problem == "shape"
    assert after == before


def spoil(folder: Path, problem: str) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    if problem == "shard":
        shards[0].unlink()
    elif problem == "nothing":
        for shard in shards:
            shard.unlink()
    elif problem == "cut":
        shards[0].write_bytes(shards[0].read_bytes()[:-8])
    elif problem in {"nan", "shape"}:
        tensors = load_file(shards[0])
        name = next(iter(tensors))
        if problem == "nan":
            tensors[name].view(-1)[0] = float("nan")
        else:
            tensors[name] = tensors[name].repeat(2, *[1] * (tensors[name].dim() - 1))
        save_file(tensors, shards[0], {"format": "pt"})


async def test_updates_need_a_folder_that_is_allowed(
    start_server: StartServer, start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = start_gateway(start_server().address)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        bodies: list[Any] = [
            {"model_path": str(tmp_path)},
            {},
            {"model_path": str(tmp_path), "weight_version": "x"},
            {"model_path": str(tmp_path), "weight_version": "9" * 5000},
            {"model_path": "a\0b"},
        ]
        answers = [await http.post(PATH, json=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [403, 400, 400, 400, 400]
    assert "--checkpoints" in json.dumps(answers[0].json())
