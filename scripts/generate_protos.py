"""Makes the Python code of the API from its .proto files. Run it after every change of them.

    python scripts/generate_protos.py            writes beside the .proto files
    python scripts/generate_protos.py --out DIR  writes elsewhere (the tests compare)

grpcio-tools is pinned: its generated code loads on every protobuf from its own version to the next
major one but one, so the pin decides which protobuf releases rollwire runs on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

GRPCIO_TOOLS = "1.80.0"
PROTOS = Path(__file__).resolve().parent.parent / "protos"


def generate(out: Path) -> None:
    """Writes ``*_pb2.py``, ``*_pb2_grpc.py`` and their stubs below ``out``."""
    found = importlib.metadata.version("grpcio-tools")
    if found != GRPCIO_TOOLS:
        raise SystemExit(
            f"grpcio-tools {GRPCIO_TOOLS} makes the committed code, this environment has {found}"
        )
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("rollwire/v1/*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet,only_async:{out}",
        *sources,
    ]
    if status := protoc.main(arguments):
        raise SystemExit(status)
    for path in out.glob("rollwire/v1/*_pb2_grpc.py*"):
        if "class " not in path.read_text():  # a file without services brings nothing
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PROTOS)
    generate(parser.parse_args().out)


if __name__ == "__main__":
    sys.exit(main())
