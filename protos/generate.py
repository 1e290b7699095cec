"""Generates Python code from the `.proto` files; `make protos` and the package build call it."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def generate(*, with_stubs: bool = True) -> None:
    """Writes `*_pb2.py` and `*_pb2_grpc.py`, and type stubs, next to the `.proto` files.

    Raises:
        RuntimeError: protoc refused a file; its own message is on stderr.
    """
    from importlib.resources import files

    from grpc_tools import protoc

    sources = sorted(HERE.rglob("*.proto"))
    stubs = [f"--mypy_out={HERE}", f"--mypy_grpc_out={HERE}"] if with_stubs else []
    arguments = [
        "protoc",
        f"-I{HERE}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={HERE}",
        f"--grpc_python_out={HERE}",
        *stubs,
        *map(str, sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; see its message above")
    for source in sources:
        for path in source.parent.glob(f"{source.stem}_pb2*.py*"):
            _import_from_protos(path)


def _import_from_protos(path: Path) -> None:
    """Rewrites imports: protoc names modules after the folders here, such as `baton.v1`, but ours are in `protos`."""
    folders = sorted(folder.name for folder in HERE.iterdir() if folder.is_dir())
    names = "|".join(map(re.escape, folders))
    text = re.sub(rf"^(from|import) ({names})(?=[. ])", r"\1 protos.\2", path.read_text(), flags=re.MULTILINE)
    path.write_text(re.sub(rf"(?<![\w./'\"])((?:{names})(?:\.\w+)*\.\w+_pb2)(?!\w)", r"protos.\1", text))


if __name__ == "__main__":
    generate(with_stubs="--no-stubs" not in sys.argv)
