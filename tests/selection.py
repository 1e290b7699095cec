"""`python -m tests.selection quick | changed`: test files chosen by what they import, one path a line.

`quick`: the cheapest tests that reach neither torch nor a cluster of real processes, by the CPU seconds that
`tests.cpu_seconds` measured. `changed`: tests that reach a file that differs
from the commit named by `--since` (default: origin/main, else main, else HEAD), as git reports it.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from tests import cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformers", "safetensors", "ucxx", "triton"}
SLOW_FOLDERS = (
    "tests/chaos", "tests/clients", "tests/deploy", "tests/docs", "tests/fuzz", "tests/gpu", "tests/integration",
    "tests/interop", "tests/simulation", "tests/test_architecture.py",
)  # fmt: skip
SLOW_HELPERS = {"tests.warm", "tests.integration.cluster"}
QUICK_CPU_S = 30.0  # of all quick tests; imports, fixtures and xdist take about as long again in each of two workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("quick", "changed"))
    parser.add_argument("--since", help="a commit; for `changed`")
    options = parser.parse_args()
    modules = find_modules()
    reached = closures(modules)
    if options.which == "quick":
        chosen = quick(modules, reached)
    else:
        chosen = touched(modules, reached, changed_files(options.since))
    sys.stdout.write("".join(f"{path}\n" for path in sorted(chosen)))


def find_modules() -> dict[str, Path]:
    """Every Python file of the repository, by its module's name."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    names = ((Path(line).with_suffix("").as_posix().replace("/", "."), Path(line)) for line in listed)
    return {name.removesuffix(".__init__"): path for name, path in names if (ROOT / path).is_file()}


def closures(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """What each module imports, directly or through others: our modules, and the top names of others'."""
    direct = {name: set(_imports(ROOT / path, modules)) for name, path in modules.items()}
    found: dict[str, set[str]] = {}
    for name in direct:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                waiting.extend(direct.get(each, ()))
        found[name] = seen
    return found


def quick(modules: Mapping[str, Path], reached: Mapping[str, set[str]]) -> set[str]:
    pure = {
        str(path)
        for name, path in modules.items()
        if _is_test(path)
        and not str(path).startswith(SLOW_FOLDERS)
        and not any(each.partition(".")[0] in HEAVY or each in SLOW_HELPERS for each in reached[name])
    }
    return cheapest(pure, cpu_seconds.read(), QUICK_CPU_S)


def cheapest(files: set[str], measured: Mapping[str, float], most_s: float) -> set[str]:
    """The files of least CPU time that take at most `most_s` together. Files that nobody measured count as free."""
    by_cost = sorted(files, key=lambda file: (measured.get(file, 0.0), file))
    total_s = accumulate(measured.get(file, 0.0) for file in by_cost)
    return {file for file, so_far_s in zip(by_cost, total_s, strict=True) if so_far_s <= most_s}


def touched(modules: Mapping[str, Path], reached: Mapping[str, set[str]], changed: set[str]) -> set[str]:
    names = {name for name, path in modules.items() if str(path) in changed}
    return {
        str(path)
        for name, path in modules.items()
        if _is_test(path) and not str(path).startswith(("tests/clients", "tests/gpu")) and reached[name] & names
    }


def changed_files(since: str | None) -> set[str]:
    base = since or next(
        (name for name in ("origin/main", "main") if _git("rev-parse", "--verify", "-q", name)), "HEAD"
    )
    differ = _git("diff", "--name-only", base) if base == "HEAD" else _git("diff", "--name-only", "--merge-base", base)
    return {*differ, *_git("ls-files", "--others", "--exclude-standard")}


def _is_test(path: Path) -> bool:
    return path.parts[0] == "tests" and path.name.startswith("test_")


def _imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Of imports inside of functions, too; a package's own `__init__` counts with each of its modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            top = name.partition(".")[0]
            if name in modules:
                yield name
            elif top in HEAVY:
                yield top


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
