"""The file with the last outcomes of each model, from which docs/models.md gets its table."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from baton.core.version import __version__
from tests.conformance.families.models import Case
from tests.conformance.families.run import Outcome

FILE = Path(__file__).resolve().parents[3] / "bench" / "results" / "families.json"
_LIBRARIES = ("transformers", "peft", "torch")

# By architecture, the name of a tiny model, and column.
Cells = Mapping[str, Mapping[str, Mapping[str, Outcome]]]


def write(cells: Cells, path: Path = FILE) -> None:
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "version": __version__,
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    plain = {
        architecture: {
            name: {column: [outcome.what, outcome.why] for column, outcome in row.items()}
            for name, row in models.items()
        }
        for architecture, models in cells.items()
    }
    path.write_text(json.dumps(about | {"cells": plain}, indent=1) + "\n")


def updated(cells: Cells, rerun: Cells, known: Iterable[Case]) -> Cells:
    """The cells with those of another run in place of theirs, in the order of the known models and without others."""
    merged: dict[str, dict[str, Mapping[str, Outcome]]] = {}
    for case in known:
        for found in (rerun, cells):
            row = found.get(case.architecture, {}).get(case.name)
            if row is not None:
                merged.setdefault(case.architecture, {})[case.name] = row
                break
    return merged


def read(path: Path = FILE) -> Cells:
    cells: Cells = {
        architecture: {
            name: {column: Outcome(*outcome) for column, outcome in row.items()} for name, row in models.items()
        }
        for architecture, models in json.loads(path.read_text())["cells"].items()
    }
    return cells
