"""Text whose characters are split over tokens, and stop strings that are not yet whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from gateway.spoken import END

if TYPE_CHECKING:
    from gateway.spoken import SpokenPolicy

KOREAN = "한국어 날씨는 좋아요 é 👍🏽 ok"


async def texts(policy: SpokenPolicy, **options: object) -> list[str]:
    stream = await policy.ask(stream=True, **options)
    return [event.choices[0].delta.content or "" async for event in stream]


async def test_only_whole_characters_are_sent(policy: SpokenPolicy) -> None:
    policy.server._pause = 0.01  # so that messages have few tokens
    policy.say(KOREAN + END)
    assert len(policy.says) > 30  # most characters take three tokens
    parts = await texts(policy)
    assert "".join(parts) == KOREAN
    assert not any("\ufffd" in part for part in parts)
    assert len([part for part in parts if part]) > 5


async def test_an_aborted_stream_shows_what_was_held_back(policy: SpokenPolicy) -> None:
    policy.server._pause = 0.01
    policy.say("abc " * 50)
    text, ids, aborted = "", [], None
    extra = {"return_token_ids": True, "request_id": "mine"}
    async for event in await policy.ask(stream=True, stop="c abc abc x", extra_body=extra):
        (choice,) = event.choices
        text += choice.delta.content or ""
        ids += (choice.model_extra or {}).get("token_ids", [])
        if len(ids) > 20 and aborted is None:
            url = str(policy.client.base_url).replace("/v1/", "/abort_request")
            aborted = await policy.client.post(url, body={"rid": "mine"}, cast_to=object)
    assert aborted == {"success": True, "message": "", "sequences": 1}
    assert choice.finish_reason == "abort"
    assert text == policy.tokenizer.decode(ids)
    assert ids == policy.says[: len(ids)]


@pytest.mark.parametrize(
    ("stop", "shown"), [("좋아", "한국어 날씨는 "), ("씨는 좋", "한국어 날"), ("없", KOREAN)]
)
async def test_what_may_become_a_stop_string_is_held_back(
    policy: SpokenPolicy, stop: str, shown: str
) -> None:
    policy.say(KOREAN + END)
    parts = await texts(policy, stop=stop)
    assert "".join(parts) == shown
    (choice,) = (await policy.ask(stop=stop)).choices
    assert (choice.message.content, choice.finish_reason) == (shown, "stop")
    assert choice.stop_reason == (stop if shown != KOREAN else policy.says[-1])
