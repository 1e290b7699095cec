"""`python -m tests.figures [ROOT]`: figures of a source tree, next to those of 8c30404b.

The restructuring began there. It reads files as text and imports none of them, so it counts in any checkout.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

NOT_SHIPPED = ("bench", "deploy", "docs", "examples", "tests")
NAMED = {"attention", "baton", "decode_node", "encode_node", "kvtransfer", "prefill_node"}
SECTIONS = {"Args:", "Attributes:", "Raises:", "Returns:", "Yields:"}
SMALL_LINES = 80
ADMISSION = re.compile(
    r"gateway/.*\b(admission\w*|waiting_room|admission_queue|room|node_capacity|fair_share|streams|stream_limit)\.py$"
)


@dataclass(frozen=True)
class Tree:
    """The files of one checkout."""

    root: Path

    @cached_property
    def files(self) -> list[str]:
        listed = subprocess.run(["git", "ls-files"], cwd=self.root, capture_output=True, text=True, check=True)
        return [line for line in listed.stdout.splitlines() if (self.root / line).is_file()]

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """Every shipped module by its name."""
        return {
            path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): ast.parse(self.text(path))
            for path in self.files
            if path.endswith(".py") and "/" in path and path.split("/")[0] not in (*NOT_SHIPPED, "protos", ".ci")
        }

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The shipped modules that each one imports."""
        return {name: set(self._imported(name, tree)) for name, tree in self.modules.items()}

    def text(self, path: str) -> str:
        return (self.root / path).read_text()

    def lines(self, module: str) -> int:
        path = self.root / f"{module.replace('.', '/')}.py"
        return path.read_text().count("\n") if path.is_file() else sys.maxsize  # a package's own file

    def _imported(self, name: str, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (each for each in names if each in self.modules and each != name)


def generic_packages(tree: Tree) -> int:
    return len({name.partition(".")[0] for name in tree.modules} - NAMED)


def double_class_names(tree: Tree) -> int:
    nodes = (node for module in tree.modules.values() for node in ast.walk(module))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    return sum(count > 1 for count in names.values())


def small_files_with_one_importer(tree: Tree) -> int:
    """Files of at most 80 lines whose only importer is in their own folder."""
    importers = {name: [each for each, names in tree.imports.items() if name in names] for name in tree.modules}
    return sum(
        len(found) == 1
        and found[0].rpartition(".")[0] == name.rpartition(".")[0]
        and tree.lines(name) <= SMALL_LINES
        and not name.endswith("__main__")
        for name, found in importers.items()
    )


def docstrings_that_begin_with_a_section(tree: Tree) -> int:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    nodes = (node for module in tree.modules.values() for node in ast.walk(module) if isinstance(node, kinds))
    return sum((ast.get_docstring(node) or "").partition("\n")[0].strip() in SECTIONS for node in nodes)


def rooms(tree: Tree, package: str) -> set[str]:
    """Folders of a package, and its files that lie in none."""
    return {room for name in tree.modules if (room := _room(name, package))}


def arrows(tree: Tree, package: str) -> set[tuple[str, str]]:
    """Which room imports which."""
    pairs = {
        (_room(name, package), _room(each, package)) for name, imported in tree.imports.items() for each in imported
    }
    return {(low, high) for low, high in pairs if low and high and low != high}


def arrows_back(tree: Tree, package: str) -> int:
    """Arrows between rooms that reach each other: without them, the rooms have an order."""
    found = arrows(tree, package)
    reached = {low: {high for each, high in found if each == low} for low, _ in found}
    for _ in reached:
        for names in reached.values():
            names |= {more for name in list(names) for more in reached.get(name, ())}
    return sum(low in reached.get(high, ()) for low, high in found)


def _room(module: str, package: str) -> str:
    """The part of a module's name after the package's; the package may lie below `baton`."""
    inside = module.removeprefix("baton.")
    return inside.split(".")[1] if inside.startswith(f"{package}.") else ""


def settings(tree: Tree) -> int:
    """Fields of the settings classes."""
    fields = {
        (owner.name, field.target.id)
        for name, module in tree.modules.items()
        if name.startswith("baton.")
        for owner in ast.walk(module)
        if isinstance(owner, ast.ClassDef) and owner.name.endswith("Settings")
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _called(field.value) == "Field"
    }
    return len(fields)


def flags(tree: Tree) -> int:
    """Options of commands, which are not settings."""
    nodes = (node for module in tree.modules.values() for node in ast.walk(module))
    return sum(_called(node) in ("Option", "add_argument") and _has_flag(node) for node in nodes)


def _called(node: ast.AST | None) -> str:
    """The last name of what is called; "" if nothing is."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _has_flag(node: ast.AST) -> bool:
    texts = [each.value for each in getattr(node, "args", ()) if isinstance(each, ast.Constant)]
    return _called(node) == "Option" or any(str(text).startswith("--") for text in texts)


def metrics(tree: Tree) -> int:
    """Rows of the table of metrics."""
    tables = (module for name, module in tree.modules.items() if name.endswith(".declared"))
    return sum(_called(node) == "Metric" for module in tables for node in ast.walk(module))


def messages(tree: Tree) -> int:
    protos = (path for path in tree.files if path.startswith("protos/baton/") and path.endswith(".proto"))
    return sum(len(re.findall(r"^\s*message \w+", tree.text(path), re.MULTILINE)) for path in protos)


def longest_page(tree: Tree) -> int:
    """Words of the longest page in docs/ that no program writes."""
    pages = [path for path in tree.files if re.fullmatch(r"docs/[\w-]+\.md", path)]
    return max(len(tree.text(path).split()) for path in pages if path.replace(".md", ".py") not in tree.files)


def admission_lines(tree: Tree) -> int:
    return sum(tree.text(path).count("\n") for path in tree.files if ADMISSION.search(path))


def admission_constants(tree: Tree) -> int:
    """Numbers that a name in capitals holds."""
    files = [ast.parse(tree.text(path)) for path in tree.files if ADMISSION.search(path)]
    return sum(len(list(_constants(statement))) for file in files for statement in file.body)


def _constants(statement: ast.stmt) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    value = getattr(statement, "value", None)
    if value is not None and any(isinstance(node, ast.Constant) and _is_number(node) for node in ast.walk(value)):
        for target in targets:
            names = (node.id for node in ast.walk(target) if isinstance(node, ast.Name)) if target else ()
            yield from (name for name in names if name.isupper())


def _is_number(node: ast.Constant) -> bool:
    return isinstance(node.value, int | float) and not isinstance(node.value, bool)


# What is counted, the value on 8c30404b, and how.
FIGURES: tuple[tuple[str, int, Callable[[Tree], int]], ...] = (
    ("top-level packages with generic names", 9, generic_packages),
    ("public class names defined more than once", 82, double_class_names),
    ("files of at most 80 lines with one importer, in their folder", 50, small_files_with_one_importer),
    ("docstrings that begin with a section", 145, docstrings_that_begin_with_a_section),
    ("rooms of the gateway", 77, lambda tree: len(rooms(tree, "gateway"))),
    ("arrows between them", 228, lambda tree: len(arrows(tree, "gateway"))),
    ("of them back up", 2, lambda tree: arrows_back(tree, "gateway")),
    ("rooms of the models", 31, lambda tree: len(rooms(tree, "models"))),
    ("arrows between them", 119, lambda tree: len(arrows(tree, "models"))),
    ("of them back up", 82, lambda tree: arrows_back(tree, "models")),
    ("settings", 108, settings),
    ("flags of commands", 134, flags),
    ("metrics", 66, metrics),
    ("messages", 108, messages),
    ("words of the longest page that no program writes", 2_657, longest_page),
    ("lines of admission", 1_299, admission_lines),
    ("constants of admission", 50, admission_constants),
)


def main() -> None:
    tree = Tree(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1])
    sys.stdout.write(f"{'8c30404b':>10} {'now':>6}\n")
    for name, before, count in FIGURES:
        sys.stdout.write(f"{before:>10} {count(tree):>6}  {name}\n")


if __name__ == "__main__":
    main()
