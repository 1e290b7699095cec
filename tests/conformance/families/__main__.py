"""`make test-families`: every tiny model in every column, and the file with the outcomes."""

import argparse
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.conformance.families import results
from tests.conformance.families.models import cases
from tests.conformance.families.run import FAILED, Outcome, run_case, run_two_ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-families", description=__doc__)
    parser.add_argument(
        "--models", default="", help="only the models with these names, comma-separated; others keep their outcomes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # of transformers, about the sizes of tiny models
    known = cases()
    names = [name for name in arguments.models.split(",") if name] or list(known)
    cells: dict[str, dict[str, dict[str, Outcome]]] = {}
    with TemporaryDirectory(prefix="baton-families-") as folder:
        together = run_two_ranks([known[name] for name in names], Path(folder) / "tp2")
        for number, name in enumerate(names):
            row = run_case(known[name], Path(folder) / str(number))
            row["tp2"] = together[name]
            cells.setdefault(known[name].architecture, {})[name] = row
            print(f"{name}: " + ", ".join(f"{column} {outcome}" for column, outcome in row.items()), flush=True)
    results.write(results.updated(results.read(), cells, known.values()) if arguments.models else cells)
    return int(
        any(outcome.what == FAILED for models in cells.values() for row in models.values() for outcome in row.values())
    )


if __name__ == "__main__":
    raise SystemExit(main())
