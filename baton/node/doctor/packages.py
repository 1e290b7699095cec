"""Checks that the packages that a node imports are installed and work."""

import importlib
import importlib.metadata
from collections.abc import Iterator

from baton.node.doctor.verdict import Verdict, fail, ok, warn

# Distribution, module, and whether a node runs without it.
_NEEDED = (("torch", "torch"), ("triton", "triton"), ("grpcio", "grpc"), ("ucxx-cu13", "ucxx"))
_REINSTALL = "install the package again in an environment of its own: pip install baton-serving"


def check_packages() -> Iterator[Verdict]:
    for distribution, module in _NEEDED:
        yield _import(distribution, module)


def _import(distribution: str, module: str) -> Verdict:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (a broken library may raise anything)
        return fail(distribution, f"does not import: {type(error).__name__}: {error}", _REINSTALL)
    try:
        return ok(distribution, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return warn(distribution, f"{module} works, its version is unknown", _REINSTALL)
