"""Generates `baton/protos` from the `.proto` files here; `make protos` and the package build call it."""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "baton" / "protos"


def generate(*, with_stubs: bool = True) -> None:
    """Writes `*_pb2.py` and `*_pb2_grpc.py`, and type stubs.

    `protos/baton/v1/common.proto` becomes `baton.protos.v1.common_pb2`; the other folders keep their names.

    Raises:
        RuntimeError: protoc refused a file; its own message is on stderr.
    """
    from importlib.resources import files

    from grpc_tools import protoc

    with TemporaryDirectory() as made:
        stubs = [f"--mypy_out={made}", f"--mypy_grpc_out={made}"] if with_stubs else []
        arguments = [
            "protoc",
            f"-I{HERE}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={made}",
            f"--grpc_python_out={made}",
            *stubs,
            *map(str, sorted(HERE.rglob("*.proto"))),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc failed; see its message above")
        for path in Path(made).rglob("*_pb2*.py*"):
            folder = PACKAGE / str(path.parent.relative_to(made)).removeprefix("baton/")
            (folder / path.name).write_text(_import_from_package(path.read_text()))
    _delete_leftovers()


def _delete_leftovers() -> None:
    """Deletes what an earlier release generated from files that are gone: it would register its messages again."""
    for path in PACKAGE.rglob("*_pb2*.py*"):
        proto = HERE / (path.parent.relative_to(PACKAGE) / path.name.partition("_pb2")[0]).with_suffix(".proto")
        if not proto.exists() and not (HERE / "baton" / proto.relative_to(HERE)).exists():
            path.unlink()


def _import_from_package(code: str) -> str:
    """Rewrites imports: protoc names modules after the folders of the `.proto` files."""
    folders = sorted(folder.name for folder in HERE.iterdir() if folder.is_dir())
    names = "|".join(map(re.escape, folders))
    code = re.sub(rf"^(from|import) ({names})(?=[. ])", r"\1 baton.protos.\2", code, flags=re.MULTILINE)
    code = re.sub(rf"(?<![\w./'\"])((?:{names})(?:\.\w+)*\.\w+_pb2)(?!\w)", r"baton.protos.\1", code)
    return code.replace("baton.protos.baton.", "baton.protos.")


if __name__ == "__main__":
    generate(with_stubs="--no-stubs" not in sys.argv)
