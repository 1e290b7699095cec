"""The demo models' corpus: English prose from the standard library (PSF licence) of the Python that runs this script.

Sources are docstrings and comments of its .py files (tests too), docstrings of its C modules, and pydoc's topics.
"""

import argparse
import ast
import hashlib
import importlib
import inspect
import io
import re
import sys
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
MIN_PARAGRAPH_CHARS = 50  # shorter ones teach a model to list phrases, not to finish sentences
MIN_DOCUMENT_CHARS = 400  # shorter neighbours in one file are joined, so that an answer has some sentences
SHINGLE_WORDS = 6
HELD_OUT_PERCENT = 3

PLAIN_WORD = re.compile(r"""[(\["'`*]*[A-Za-z][A-Za-z'’-]*[)\]"'`*]*[.,;:!?]*[)\]"'`]*""")
COMMON_WORD = re.compile(
    "[(]?(a|an|and|are|as|at|be|been|but|by|can|does|for|from|had|has|have|if|in|is|it|its|may|must|no|not|of|on|or|"
    "should|so|than|that|the|their|then|there|these|they|this|to|was|we|when|which|will|with|would|you)[,.;:)]*"
)
LIST_ITEM = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+")
ROLE = re.compile(r":[a-z:+-]+:`~?!?([^`<]+?)(?:\s*<[^`>]*>)?`")
NOT_PROSE = re.compile(r">>>|https?://|\bCopyright\b|[{}]|\$\w|[=<>|+*/\\~^_-]{4,}|@\w|\w\(\w*=|[^\x00-\x7f]")
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages"})  # packages that are not the standard library's


def files(root: Path) -> Iterator[Path]:
    """Every Python file of the library below `root`, in a stable order."""
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            yield path


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each docstring of module, class and function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield (node.body[0].lineno, text)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each run of comment lines that stand alone."""
    run: list[str] = []
    start = last = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not token.line.lstrip().startswith("#"):
            continue
        line, this_column = token.start
        if run and (line != last + 1 or this_column != column):
            yield (start, "\n".join(run))
            run = []
        if not run:
            start, column = line, this_column
        run.append(re.sub(r"^#+[!:]? ?", "", token.string))
        last = line
    if run:
        yield (start, "\n".join(run))


def texts_of_file(path: Path) -> list[str]:
    """Docstrings and comments of one file in the order of its lines; none if it is not valid Python."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings(action="ignore"):
            source = file.read()
            return [text for _, text in sorted([*docstrings(source), *comments(source)])]
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, tokenize.TokenError):
        return []  # the test suite holds files that are broken on purpose


def texts_of_c_module(name: str) -> list[str]:
    """Docstrings of a module that is not written in Python, and of what it defines."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return []
    found = [module.__doc__]
    for _, member in inspect.getmembers(module):
        found.append(getattr(member, "__doc__", None))
        if inspect.isclass(member):
            found.extend(getattr(value, "__doc__", None) for value in vars(member).values())
    return [inspect.cleandoc(text) for text in found if isinstance(text, str)]


def c_modules() -> list[str]:
    """Names of the C modules that are built into this interpreter or lie next to its library."""
    folder = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    libraries = {path.name.split(".")[0] for path in folder.glob("*.*")}
    names = libraries | set(sys.builtin_module_names)
    return sorted(name for name in names if "test" not in name and not name.startswith("xx"))


def topics() -> dict[str, list[str]]:
    """pydoc's help topics, which are pages of the language reference."""
    from pydoc_data.topics import topics as pages

    return {f"topic {name}": [text] for name, text in sorted(pages.items())}


def prose(paragraph: str) -> str | None:
    """The paragraph on one line without markup, or None where it is code, a table, a signature or not English."""
    text = ROLE.sub(r"\1", " ".join(paragraph.split()))
    text = re.sub(r"\*\*(\w[^*]*)\*\*", r"\1", text.replace("``", "`")).replace("`", "'")
    words = text.split()
    if len(text) < MIN_PARAGRAPH_CHARS or not text[0].isupper() or NOT_PROSE.search(text):
        return None
    plain = sum(PLAIN_WORD.fullmatch(word) is not None for word in words)
    common = sum(COMMON_WORD.fullmatch(word.lower()) is not None for word in words)
    if plain < 0.8 * len(words) or common < 0.15 * len(words):
        return None
    return text if re.search(r"[.!?:][\"')]*$", text) else f"{text.rstrip(',; -')}."


def paragraphs(text: str) -> Iterator[str]:
    """Prose paragraphs of one docstring or comment; each list item is one of its own."""
    for block in re.split(r"\n\s*\n", textwrap.dedent(text.expandtabs())):
        lines = [line.strip() for line in block.splitlines()]
        if len(lines) > 1 and re.match(r"[\w.]+\(.*\)( ->.*)?$", lines[0]):
            lines = lines[1:]  # a C function's signature
        items: list[list[str]] = [[]]
        for line in lines:
            item = LIST_ITEM.match(line)
            if item and len(line) > item.end():
                items.append([line[item.end() :]])
            else:
                items[-1].append(line)
        for item_lines in items:
            kept = prose(" ".join(item_lines))
            if kept is not None:
                yield kept


class Seen:
    """Remembers word runs, to find paragraphs that repeat earlier ones."""

    def __init__(self) -> None:
        self._shingles: set[tuple[str, ...]] = set()

    def add(self, paragraph: str) -> bool:
        """Whether less than half of the paragraph's word runs were seen before; remembers them all."""
        words = re.findall(r"[a-z]+", paragraph.lower())
        last = max(1, len(words) - SHINGLE_WORDS + 1)
        shingles = [tuple(words[start : start + SHINGLE_WORDS]) for start in range(last)]
        repeated = sum(shingle in self._shingles for shingle in shingles)
        self._shingles.update(shingles)
        return 2 * repeated < len(shingles)


def sources(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, texts) of every source, the most literary first, because the first of two similar paragraphs is
    kept."""
    yield from topics().items()
    tests = []
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if "test" in name:
            tests.append((name, path))
        else:
            yield name, texts_of_file(path)
    for module in c_modules():
        yield module, texts_of_c_module(module)
    for name, path in tests:
        yield name, texts_of_file(path)


def documents(texts: list[str], seen: Seen) -> Iterator[str]:
    """New prose of one source, neighbouring pieces joined to documents of at least MIN_DOCUMENT_CHARS."""
    pending: list[str] = []
    for text in texts:
        pending.extend(paragraph for paragraph in paragraphs(text) if seen.add(paragraph))
        if sum(map(len, pending)) >= MIN_DOCUMENT_CHARS:
            yield "\n\n".join(pending)
            pending = []
    if pending:
        yield "\n\n".join(pending)


def held_out(name: str) -> bool:
    """Whether a source is held out from training. Whole sources are held out, so the loss on them is honest."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def extract(root: Path) -> tuple[list[str], list[str]]:
    """The training documents and the held-out documents of the library below `root`."""
    seen = Seen()
    training: list[str] = []
    kept: list[str] = []
    for name, texts in sources(root):
        (kept if held_out(name) else training).extend(documents(texts, seen))
    return training, kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.txt and heldout.txt from the running Python's library.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, found in zip(("train.txt", "heldout.txt"), extract(Path(sysconfig.get_path("stdlib"))), strict=True):
        (out / name).write_text(END_OF_TEXT.join(found), encoding="utf-8")
        print(f"{name}: {len(found)} documents, {sum(map(len, found))} characters")


if __name__ == "__main__":
    main()
