"""The check of structure finds what it is there for."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_structure.py"


@pytest.fixture
def check() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("check_structure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problems(check: Any, **sources: str) -> list[str]:
    """What is wrong with modules, given by name with __ for a dot."""
    trees = {name.replace("__", "."): ast.parse(source) for name, source in sources.items()}
    return check.problems({"rollwire_client": ast.parse("")} | trees)


def test_a_package_imports_only_those_below_it(check: Any) -> None:
    (problem,) = problems(
        check, rollwire_transport__a="import rollwire.types", rollwire__types="", rollwire_server=""
    )
    assert problem.startswith("rollwire_transport.a imports rollwire.types")


def test_modules_do_not_import_each_other_not_even_for_types(check: Any) -> None:
    lazy = "def f():\n    from rollwire_server.c import C"
    typed = "if TYPE_CHECKING:\n    from rollwire_server import a"
    (problem,) = problems(
        check,
        rollwire_server__a="from rollwire_server.b import B",
        rollwire_server__b=lazy,
        rollwire_server__c=typed,
        rollwire_server__d="from rollwire_server.a import A",
    )
    assert problem == "import each other: rollwire_server.a, rollwire_server.b, rollwire_server.c"


@pytest.mark.parametrize("other", ["A", "_A"])
def test_a_class_name_has_one_meaning_private_or_not(check: Any, other: str) -> None:
    (problem,) = problems(
        check, rollwire_server__a="class A: ...", rollwire_client__a=f"class {other}: ..."
    )
    assert problem.startswith("class A stands in rollwire_server.a, rollwire_client.a:")


def test_what_is_exported_has_docstrings(check: Any) -> None:
    source = "class A:\n    'Some.'\n    def f(self): ...\n    def _g(self): ...\nclass B: ..."
    (problem,) = problems(
        check, rollwire_client="from rollwire_client._a import A", rollwire_client___a=source
    )
    assert problem == "rollwire_client._a: A.f is exported and has no docstring"
