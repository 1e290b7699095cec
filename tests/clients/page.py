"""The marked blocks of the pages about clients and benchmarking, and the commands that run them."""

import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.clients.install import CLIENTS, ROOT
from tests.docs.blocks import OF_CLIENTS

PAGES = tuple(ROOT / page for page in OF_CLIENTS)
_BLOCK = re.compile(r"<!-- run: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_OTHER_PORTS = ("30000", "29000")


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        title: the heading above it.
        runs_with: "python" (that of the clients), "baton" (that of the project), "node" or "sh".
    """

    title: str
    runs_with: str
    code: str

    def at(self, *, grpc: str, http: str) -> str:
        """The code with the addresses of a running cluster in place of the default ones, and free ports for others."""
        code = self.code.replace("127.0.0.1:7000", grpc).replace("127.0.0.1:8000", http)
        code = code.replace("Client()", f'Client("{grpc}")')
        for port in _OTHER_PORTS:
            code = code.replace(port, str(free_port()))
        return code


def blocks() -> list[Block]:
    return [block for page in PAGES for block in _blocks(page.read_text())]


def _blocks(text: str) -> list[Block]:
    headings = [(match.start(), match[1]) for match in _HEADING.finditer(text)]
    return [
        Block([title for start, title in headings if start < match.start()][-1], match[1], match[2])
        for match in _BLOCK.finditer(text)
    ]


def command(runs_with: str, code: str, folder: Path) -> list[str]:
    """The command that runs a block in `folder`, which gets what the page expects in the current directory."""
    for name in ("baton", "protos", "tests"):
        (folder / name).symlink_to(ROOT / name)
    if runs_with == "python":
        return [str(CLIENTS / "python" / "bin" / "python"), "-W", "error::DeprecationWarning:__main__", "-c", code]
    if runs_with == "baton":
        return [sys.executable, "-c", code]
    if runs_with == "node":
        # Node looks for packages next to the script.
        (folder / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
        script = folder / "client.mjs"
        script.write_text(code)
        return [str(CLIENTS / "node" / "node_modules" / "node" / "bin" / "node"), str(script)]
    assert runs_with == "sh", runs_with
    return ["bash", "-euo", "pipefail", "-c", code]


def free_port() -> int:
    """A port that nobody uses, for programs that take no 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
