"""The blocks of docs/clients.md, and the commands that run them."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.clients.install import CLIENTS, ROOT

PAGE = ROOT / "docs" / "clients.md"
_BLOCK = re.compile(r"<!-- run: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of the page.

    Attributes:
        title: the heading above it.
        runs_with: "python", "node" or "sh".
    """

    title: str
    runs_with: str
    code: str

    def at(self, *, grpc: str, http: str) -> str:
        """The code with the addresses of a running cluster in place of the default ones."""
        return self.code.replace("127.0.0.1:7000", grpc).replace("127.0.0.1:8000", http)


def blocks() -> list[Block]:
    text = PAGE.read_text()
    headings = [(match.start(), match[1]) for match in _HEADING.finditer(text)]
    return [
        Block([title for start, title in headings if start < match.start()][-1], match[1], match[2])
        for match in _BLOCK.finditer(text)
    ]


def command(runs_with: str, code: str, folder: Path) -> list[str]:
    """The command that runs a block; a script is written to `folder`."""
    if runs_with == "python":
        return [str(CLIENTS / "python" / "bin" / "python"), "-W", "error::DeprecationWarning:__main__", "-c", code]
    if runs_with == "node":
        # Node finds packages beside the script, whatever its working directory.
        (folder / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
        script = folder / "client.mjs"
        script.write_text(code)
        return [str(CLIENTS / "node" / "node_modules" / "node" / "bin" / "node"), str(script)]
    assert runs_with == "sh", runs_with
    return ["bash", "-euo", "pipefail", "-c", code]
