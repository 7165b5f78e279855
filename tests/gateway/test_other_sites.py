"""Web pages that somebody reads beside a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import httpx


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://elsewhere"}, {"Origin": "null"}],
)
async def test_pages_of_other_sites_cannot_use_a_gateway_without_tokens(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    """Browsers send such a request without asking, as its body claims to be plain text."""
    headers["Content-Type"] = "text/plain"
    for path in ("/abort_request", "/update_weights_from_disk", "/generate"):
        answer = await http.post(path, content=b'{"abort_all": true}', headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "other_site"
    own = {"Sec-Fetch-Site": "same-origin", "Origin": str(http.base_url).rstrip("/")}
    answer = await http.post("/abort_request", json={"rid": "nobody"}, headers=own)
    assert answer.status_code == 200
