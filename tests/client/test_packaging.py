"""What the library needs, and says when it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import rollwire_client
from rollwire_client import Fleet, RolloutClient
from rollwire_client._rpc.channel import local_address


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )


def test_the_library_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "typer", "rich", "pydantic", "rollwire_transport"]
    done = python(
        "import sys, rollwire_client; from rollwire_client import *\n"
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_publishing_without_torch_says_what_to_install() -> None:
    done = python(
        "import sys; sys.modules['torch'] = None\n"
        "from rollwire_client import Fleet, MissingDependencyError, Publisher\n"
        "try:\n    Publisher(Fleet(['127.0.0.1:9']))\n"
        "except MissingDependencyError as error:\n    print(error)"
    )
    assert done.stdout == "publishing needs torch: pip install 'rollwire[transport]'\n", done.stderr


def test_the_command_without_its_extra_says_what_to_install() -> None:
    done = python(
        "import sys; sys.modules['typer'] = None\nfrom rollwire_client._cli import main; main()"
    )
    assert done.returncode == 1
    assert done.stderr == (
        "rollwire: the command needs typer and rich: pip install 'rollwire[cli]'\n"
    )


def test_the_gateway_without_its_extra_says_what_to_install() -> None:
    done = python(
        "import sys; sys.modules['uvicorn'] = None\n"
        "sys.argv = ['rollwire', 'gateway', '127.0.0.1:9']\n"
        "from rollwire_client._cli import main; main()"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ("rollwire: the gateway needs uvicorn: pip install 'rollwire[gateway]'\n")


def test_the_demo_without_its_extra_says_what_to_install_before_it_loads_anything() -> None:
    done = python(
        "import sys; sys.modules['matplotlib'] = sys.modules['torch'] = None\n"
        "sys.argv = ['rollwire', 'demo']\n"
        "from rollwire_client._cli import main; main()"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "rollwire: the demo needs torch, matplotlib: pip install 'rollwire[demo]'\n"
    )


@pytest.mark.parametrize(
    ("framework", "supported", "others"),
    [("trl", ">=1.16,<1.17", ("1.15.0", "1.17.0")), ("verl", ">=0.9.1,<0.10", ("0.9.0", "0.10.0"))],
)
def test_an_integration_without_its_extra_says_what_to_install(
    framework: str, supported: str, others: tuple[str, str]
) -> None:
    done = python(
        "import importlib, importlib.metadata as metadata\n"
        f"versions = {{'{framework}': None}}\n"
        "def version(name):\n"
        "    if versions[name] is None:\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return versions[name]\n"
        "metadata.version = version\n"
        "from rollwire_client import MissingDependencyError\n"
        f"for versions['{framework}'] in {(None, *others)}:\n"
        f"    try:\n        importlib.import_module('rollwire_client.integrations.{framework}')\n"
        "    except MissingDependencyError as error:\n        print(error)"
    )
    needed = f"this integration needs {framework}{supported}: pip install 'rollwire[{framework}]'"
    assert done.stdout.splitlines() == [
        f"{framework} is not installed, and {needed}",
        *(f"{framework} {other} is installed, and {needed}" for other in others),
    ], done.stderr


def test_all_that_is_exported_exists() -> None:
    for name in rollwire_client.__all__:
        assert hasattr(rollwire_client, name)
    public = {n for n, v in vars(rollwire_client).items() if isinstance(v, type)}
    assert public <= set(rollwire_client.__all__)


def test_timeouts_and_retries_are_no_numbers() -> None:
    with pytest.raises(TypeError, match=r"timeouts is 5: use for example Timeouts\(call=5\)"):
        Fleet(["127.0.0.1:5"], timeouts=5)
    with pytest.raises(TypeError, match=r"timeouts is 5: use for example Timeouts\(call=5\)"):
        RolloutClient("127.0.0.1:5", timeouts=5)
    with pytest.raises(TypeError, match=r"retries is 3: use for example Retries\(attempts=3\)"):
        Fleet(["127.0.0.1:5"], retries=3)


def test_a_fleet_shows_its_users_nothing_of_the_library() -> None:
    shown = {name for name in dir(Fleet(["127.0.0.1:5"])) if not name.startswith("_")}
    assert shown == {
        "close",
        "generate",
        "generate_many",
        "info",
        "newest_version",
        "pause",
        "paused",
        "policy",
        "resume",
        "session",
        "sleep",
        "stream",
        "unavailable_reason",
        "wake_up",
    }


@pytest.mark.parametrize(
    "servers",
    [
        ["127.0.0.1:5"],
        ["localhost:5"],
        ["nowhere.invalid:5", "127.0.0.2:5"],
    ],
)
def test_servers_on_this_machine_reach_it_by_loopback(servers: list[str]) -> None:
    assert local_address(servers).startswith("127.")


def test_no_route_is_an_error() -> None:
    with pytest.raises(OSError, match=r"."):
        local_address(["nowhere.invalid:5"])


@pytest.mark.parametrize(
    "address",
    ["localhost", "http://localhost:5", "dns:///localhost:5", ":5", "::1:5", "a:0", "a:99999"],
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match=f"'{address}' is not HOST:PORT"):
        RolloutClient(address)
    with pytest.raises(ValueError, match=f"'{address}' is not HOST:PORT"):
        Fleet(["127.0.0.1:5", address])


@pytest.mark.parametrize("address", ["[::1]:5", "10.0.0.1:50051", "server-0.servers.rl:50051"])
def test_addresses(address: str) -> None:
    assert RolloutClient(address).address == address


def test_a_fleet_takes_several_addresses_not_one() -> None:
    with pytest.raises(TypeError, match="a list of HOST:PORT"):
        Fleet("127.0.0.1:5")
    with pytest.raises(TypeError, match="5 is not text"):
        Fleet([5])
