"""Mistakes on the command line: one clear line, no traceback, a code that is not zero."""

from __future__ import annotations

import pytest
from rollwire_client._cli.app import run

NOBODY = "127.0.0.1:9"
REFUSED = (
    "cannot be reached: ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused "
    "(nothing listens there)"
)
GENERATE = ["generate", "--server", NOBODY, "--timeout", "0.1", "--prompt-ids", "1,2"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (GENERATE, 1, f"{NOBODY}: {REFUSED}"),
        (["info", NOBODY], 1, f"{NOBODY}: {REFUSED}"),
        (["generate", "--prompt-ids", "1"], 2, "--server"),
        (["generate", "--server", NOBODY], 2, "--prompt-ids"),
        (["generate", "--server", "here", "--prompt-ids", "1"], 2, "'here' is not HOST:PORT"),
        (["generate", "--server", "a:99999", "--prompt-ids", "1"], 2, "is not HOST:PORT"),
        (["generate", "--server", "http://a:5", "--prompt-ids", "1"], 2, "is not HOST:PORT"),
        ([*GENERATE[:-1], "1;2"], 2, "'1;2' is not token ids"),
        ([*GENERATE[:-1], "1,-1"], 2, "'1,-1' is not token ids"),
        ([*GENERATE, "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        ([*GENERATE, "--temperature", "hot"], 2, "--temperature"),
        ([*GENERATE, "--bogus"], 2, "--bogus"),
        (["info"], 2, "HOST:PORT"),
        (["info", "nowhere"], 2, "'nowhere' is not HOST:PORT"),
        (["serve"], 2, "serve"),
        (["top"], 2, "HOST:PORT"),
        (["top", "nowhere"], 2, "nowhere"),
        (["top", "dns:///x"], 2, "'x' is not HOST:PORT"),
        (["top", "dns:///x:5", NOBODY], 2, "dns:///x:5"),
        (["publish", "/", "--server", "nowhere"], 2, "nowhere"),
        (["publish", "/nowhere", "--server", NOBODY], 2, "/nowhere"),
        (["publish", "/"], 2, "--server"),
        (["publish", "/", "--server", NOBODY, "--kv-policy", "burn"], 2, "burn"),
        (["publish", "/", "--server", NOBODY, "--max-kv-lag", "-1"], 2, "--max-kv-lag"),
        (
            ["publish", "/", "--server", NOBODY, "--kv-policy=recompute", "--max-kv-lag=2"],
            2,
            "max_kv_lag is 2, but KvPolicy.RECOMPUTE keeps no keys and values",
        ),
        (["publish", "/", "--server", NOBODY, "--version", "-1"], 2, "--version"),
        (["publish", "/", "--server", NOBODY, "--version", str(2**63)], 2, "--version"),
        (["sleep"], 2, "HOST:PORT"),
        (["sleep", NOBODY], 1, f"{NOBODY}: {REFUSED}"),
        (["sleep", NOBODY, "--weights", "burn"], 2, "burn"),
        (["wake", NOBODY, "--timeout", "0"], 2, "--timeout"),
        (["pause", NOBODY, "--lease", "-1"], 2, "--lease"),
        (["resume", "nowhere"], 2, "nowhere"),
        (["gateway"], 2, "HOST:PORT"),
        (["gateway", "nowhere"], 2, "nowhere"),
        (["gateway", NOBODY, "--listen", "here"], 2, "'here' is not HOST:PORT"),
        (["gateway", NOBODY, "--checkpoints", "/nowhere"], 2, "/nowhere"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], code: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("rollwire: ")
    assert err.count("\n") == 1


def test_no_arguments_show_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capfd.readouterr()
    assert "generate" in out
    assert err == ""
