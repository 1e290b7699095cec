"""The fenced blocks of all pages, and what is to happen with each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.site_files import ROOT, pages

# Blocks in these languages are commands or programs: they run, or their title says why not.
RUNNABLE = ("console", "bash", "sh", "python")
OTHER = ("json", "yaml", "toml", "text", "promql", "protobuf", "diff", "html", "ini")
# What a title may give as the reason for which a block is only checked, not run.
REASONS = (
    "needs a GPU",
    "needs Kubernetes",
    "needs several machines",
    "needs the network",
    "needs a container engine",
    "takes minutes",
    "installs packages",
)
# Pages whose marked blocks `make test-clients` runs, with clients that other people wrote.
OF_CLIENTS = (
    "docs/clients.md",
    "docs/agents.md",
    "docs/assistants.md",
    "docs/clients-grpc.md",
    "docs/resuming.md",
    "docs/client-tests.md",
    "docs/benchmarking.md",
)
_BLOCK = re.compile(
    r"^(?:<!-- run: (?P<marker>\w+) -->\n)?(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^ *```$", re.M | re.S
)
_TITLE = re.compile(r'title="([^"]*)"')
_HEADING = re.compile(r"^#+ (.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: path in the repository.
        heading: the heading above it.
        title: shown above the block on the site: a reason not to run it, or the name of a file.
        marker: how `make test-clients` runs it; empty: it does not.
    """

    page: str
    line: int
    heading: str
    language: str
    title: str
    marker: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str:
        """Why it is not run here; empty: it is."""
        if self.marker and self.page in OF_CLIENTS:
            return "run by make test-clients"
        return self.title if self.title.startswith(REASONS) else ""

    @property
    def commands(self) -> list[str]:
        """The commands of a terminal, each with its continued lines; the whole block where it is a script."""
        return list(_prompted(self.code)) if self.language == "console" else [self.code]


@cache
def blocks() -> tuple[Block, ...]:
    return tuple(block for page in pages() for block in read_blocks(page))


def to_run() -> list[Block]:
    """The blocks whose commands can run here."""
    return [block for block in blocks() if block.language in RUNNABLE and not block.reason]


def read_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    headings = [(match.start(), match[1]) for match in _HEADING.finditer(text)]
    for match in _BLOCK.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        yield Block(
            page=page.relative_to(ROOT).as_posix(),
            line=text.count("\n", 0, match.start()) + 1,
            heading=next((name for start, name in reversed(headings) if start < match.start()), ""),
            language=language,
            title=title[1] if title else "",
            marker=match["marker"] or "",
            code=re.sub(f"^{match['indent']}", "", match["code"], flags=re.M),
        )


def _prompted(code: str) -> Iterator[str]:
    command: list[str] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            command = [line.removeprefix("$ ")]
        elif command:
            command.append(line)
        if command and not line.endswith("\\"):
            yield "\n".join(command)
            command = []
