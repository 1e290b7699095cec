"""Builds the Python code of the `.proto` files beside this file; `make protos` and the package build call it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def generate(*, with_stubs: bool = True) -> None:
    """Writes `*_pb2.py` and `*_pb2_grpc.py` (and type stubs) into this folder.

    Raises:
        RuntimeError: protoc refused a file; its own message is on stderr.
    """
    from importlib.resources import files

    from grpc_tools import protoc

    stubs = [f"--mypy_out={HERE.parent}", f"--mypy_grpc_out={HERE.parent}"] if with_stubs else []
    arguments = [
        "protoc",
        f"-I{HERE.parent}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={HERE.parent}",
        f"--grpc_python_out={HERE.parent}",
        *stubs,
        *sorted(str(path) for path in HERE.glob("*.proto")),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; see its message above")


if __name__ == "__main__":
    generate(with_stubs="--no-stubs" not in sys.argv)
