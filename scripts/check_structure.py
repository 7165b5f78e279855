"""Checks how the product's modules depend on each other, and that a class name means one thing,
with or without an underscore before it.

Imports that only type checkers see count: who reads a module reads them too.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent

# The packages, where each stands, and which of the others it may import.
PACKAGES = {
    "rollwire": ("protos", set()),
    "rollwire_transport": ("transport", set()),
    "rollwire_server": ("server", {"rollwire", "rollwire_transport"}),
    "rollwire_client": ("trainer_client", {"rollwire", "rollwire_transport", "rollwire_demo"}),
    "rollwire_demo": ("examples", {"rollwire_client"}),
}


def main() -> int:
    """Prints what is wrong; the exit status."""
    found = problems({name: ast.parse(path.read_text()) for name, path in _modules().items()})
    for problem in found:
        print(problem)
    return bool(found)


def problems(modules: dict[str, ast.Module]) -> list[str]:
    """What is wrong with modules, by their dotted names."""
    imports = {name: _imports(name, tree, modules) for name, tree in modules.items()}
    return [*_arrows(imports), *_circles(imports), *_names(modules), *_docstrings(modules)]


def _modules() -> dict[str, Path]:
    found = {}
    for package, (folder, _) in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def _imports(name: str, tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """The product's modules that a module names in import statements, wherever they stand."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = inner & modules.keys()
            found |= submodules
            if inner - submodules:  # a name of the module itself
                found.add(node.module)
    return {module for module in found if module.split(".")[0] in PACKAGES} - {name}


def _arrows(imports: dict[str, set[str]]) -> list[str]:
    found = []
    for name, imported in imports.items():
        package = name.split(".")[0]
        _, allowed = PACKAGES[package]
        found += [
            f"{name} imports {other}: {package} may not import {other.split('.')[0]}"
            for other in sorted(imported)
            if other.split(".")[0] not in allowed | {package}
        ]
    return found


def _circles(imports: dict[str, set[str]]) -> list[str]:
    reachable = {name: _reachable(name, imports) for name in imports}
    circles = {
        frozenset(other for other in reached if name in reachable.get(other, ()))
        for name, reached in reachable.items()
        if name in reached
    }
    return [f"import each other: {', '.join(sorted(circle))}" for circle in circles]


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _names(modules: dict[str, ast.Module]) -> list[str]:
    places = defaultdict(list)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(name)
    return [
        f"class {name} stands in {', '.join(where)}: give each meaning a name of its own"
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def _docstrings(modules: dict[str, ast.Module]) -> list[str]:
    """What ``rollwire_client`` exports from its private modules without a docstring; ruff sees to
    the public ones.
    """
    exported = {
        (node.module, alias.name)
        for node in modules["rollwire_client"].body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return [
        f"{module}: {node.name}{'.' + inner.name if inner is not node else ''} is exported and has "
        "no docstring"
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and (module, node.name) in exported
        for inner in (node, *node.body)
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if not inner.name.startswith("_") and ast.get_docstring(inner) is None
    ]


if __name__ == "__main__":
    sys.exit(main())
