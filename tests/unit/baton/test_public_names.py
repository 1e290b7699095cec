"""`import baton` offers the names for users, and loads nothing until one is used."""

import ast
import subprocess
import sys
from pathlib import Path

import baton
from baton.core import errors

SOURCE = Path(baton.__file__)


def declared_for_types() -> set[str]:
    """The names that type checkers see."""
    block = next(node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If))
    return {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_type_checkers_and_programs_see_the_same_names() -> None:
    public = {name for name in dir(baton) if not name.startswith("_")}
    assert declared_for_types() <= public
    assert all(getattr(baton, name) is not None for name in declared_for_types())


def test_every_error_is_offered() -> None:
    found = {errors.BatonError}
    while more := {child for error in found for child in error.__subclasses__()} - found:
        found |= more
    assert {error.__name__ for error in found if error.__module__ == errors.__name__} <= declared_for_types()


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(baton, "Klient")


def test_importing_the_package_loads_no_grpc_and_no_protobuf() -> None:
    program = "import sys, baton; print(sorted({'grpc', 'google.protobuf', 'pydantic', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
