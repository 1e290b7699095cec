"""A page's commands as somebody types them, in order: programs that serve run in the background, on free ports.

Three things differ from the page: ports are free ones, so that no other server is in the way; a program that would run
until Ctrl-C is ended after its first output, or with the page if it serves; `baton doctor` asks for no speed.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from docs.site_files import ROOT
from tests.clients.page import free_port
from tests.docs.blocks import Block
from tests.docs.commands import ROLES
from tests.warm import BATON, Forked, launch_warm, run_warm

DEADLINE_S = 300.0
GRPC, HTTP = "127.0.0.1:7000", "127.0.0.1:8000"
_SHELL = re.compile(r"[|&;<>$`(*]|^\w+=|^export ")
_CALLS_A_GATEWAY = ("generate", "chat", "status", "top", "role")
_FOREVER = "--watch"
_CHAT = "What does zip do?\n"


class Starter(Protocol):
    """What `baton up` does in a page."""

    def up(self, arguments: list[str], environment: Mapping[str, str], folder: Path) -> dict[str, object]:
        """The line that `baton up` prints."""
        ...


class Terminal:
    """One page's commands. Variables and files that a command leaves are there for the next.

    Args:
        folder: the working directory.
        starter: of clusters.
    """

    def __init__(self, folder: Path, starter: Starter) -> None:
        self._folder, self._starter = folder, starter
        self._environment = {
            **os.environ,
            "PATH": f"{_programs(folder)}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BATON_DEVICE": "cpu",
            "PYTHONSAFEPATH": "",
        }
        self._places = {GRPC: GRPC, HTTP: HTTP}
        self._serving: list[Forked] = []
        for name in ("models", "protos", "bench", "deploy", "docs", "examples", "tests"):
            (folder / name).symlink_to(ROOT / name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._serving):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60.0)
            process.kill()

    def run(self, block: Block) -> None:
        """Raises AssertionError with what a command printed if one of them fails."""
        if block.language == "python":
            self._python(block)
            return
        for command in block.commands:
            self._command(block, self._here(command.replace(".venv/bin/", "")))

    def _command(self, block: Block, command: str) -> None:
        started = re.sub(r"(?m)(^|\s)#.*$", "", re.sub(r"\\\n\s*", " ", command)).strip()
        first, _, last = started.rpartition("&& ")
        words = shlex.split(last) if "baton " in last else []
        variables = [word for word in words if re.match(r"\w+=", word)]
        words = words[len(variables) :]
        if words[:2] == ["baton", "up"]:
            if first:
                self._shell(block, first.removesuffix("&& "))
            self._up(words[2:], dict(word.split("=", 1) for word in variables))
        elif words[:1] == ["baton"] and words[1:2] and words[1] in ROLES:
            self._role(words[1], words[2:], dict(word.split("=", 1) for word in variables))
        elif words[:1] == ["baton"] and not first and not variables and not _SHELL.search(started):
            self._baton(block, words[1:])
        else:
            self._shell(block, command)

    def _up(self, arguments: list[str], variables: Mapping[str, str]) -> None:
        line = self._starter.up(arguments, {**self._environment, **variables}, self._folder)
        self._places[GRPC], self._places[HTTP] = str(line["gateway"]), str(line["http"]).partition("//")[2]
        self._environment["BATON_TARGET"] = self._places[GRPC]

    def _role(self, role: str, arguments: list[str], variables: Mapping[str, str]) -> None:
        report = self._folder / f"ready-{len(self._serving)}.json"
        report.unlink(missing_ok=True)
        module = "baton.gateway.picker" if role == "picker" else role.replace("-", "_")
        process = launch_warm(
            module,
            [*arguments, "--ready-file", str(report)],
            variables={**self._environment, **variables},
            folder=self._folder,
            outputs=_new_folder(self._folder / f"{role}-{len(self._serving)}"),
        )
        self._serving.append(process)
        if role in ("gateway", "picker"):  # nodes bind their ports before they load, so a gateway may come at once
            _until(report.is_file, process)
        if role == "gateway":
            self._places[GRPC] = self._environment["BATON_TARGET"] = json.loads(report.read_text())["address"]

    def _baton(self, block: Block, words: list[str]) -> None:
        if words[0] in _CALLS_A_GATEWAY and "--target" not in words:
            words = [words[0], "--target", self._places[GRPC], *words[1:]]
        if words[0] == "doctor":
            words += ["--min-gb-per-s", "0"]
        if words[0] == "chat" or _FOREVER in words:
            self._shell(block, shlex.join(["baton", *words]))
            return
        variables = {name: value for name, value in self._environment.items() if name.startswith(("BATON_", "PATH"))}
        done = run_warm(BATON, *words, prepare=None, folder=self._folder, timeout_s=DEADLINE_S, **variables)
        _check(block, shlex.join(words), done.returncode, done.stdout + done.stderr)

    def _shell(self, block: Block, command: str) -> None:
        """Runs it in bash, and keeps the variables that it exports."""
        for each in _CALLS_A_GATEWAY:
            command = re.sub(rf"\bbaton {each}\b(?! --target)", f"baton {each} --target {self._places[GRPC]}", command)
        if _FOREVER in command:
            command = f"timeout --signal INT --preserve-status 5 {command} || test $? = 130"
        left = self._folder / ".environment"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{command}\nenv -0 > {shlex.quote(str(left))}"],
            cwd=self._folder,
            env=self._environment,
            input=_CHAT if "baton chat" in command else "",
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        _check(block, command, done.returncode, done.stdout + done.stderr)
        self._environment = dict(item.split("=", 1) for item in left.read_text().split("\0") if item)

    def _python(self, block: Block) -> None:
        done = subprocess.run(
            [sys.executable, "-c", self._here(block.code)],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        _check(block, block.code, done.returncode, done.stdout + done.stderr)

    def _here(self, text: str) -> str:
        """The text with the addresses of what runs, and with free ports for the others that it names."""
        for port in set(re.findall(r"(?:127\.0\.0\.1|localhost|0\.0\.0\.0):(\d{4,5})\b", text)):
            known = f"127.0.0.1:{port}"
            if known not in self._places:
                self._places[known] = f"127.0.0.1:{free_port()}"
        if "--listen" in text and GRPC in text:
            self._places[GRPC] = f"127.0.0.1:{free_port()}"
        for known, place in self._places.items():
            text = text.replace(known, place)
        return text


@dataclass(frozen=True)
class Started:
    """One cluster that serves already, for pages that start none but the default one. `line` is that of `baton up`."""

    line: dict[str, object]

    def up(self, arguments: list[str], _environment: Mapping[str, str], _folder: Path) -> dict[str, object]:
        assert arguments == [], f"this page starts a cluster of its own: baton up {' '.join(arguments)}"
        return self.line


class Clusters:
    """The clusters that `baton up` started, by its variables and flags: pages share them. A context manager."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], tuple[subprocess.Popen[str], dict[str, object]]] = {}

    def up(self, arguments: list[str], environment: Mapping[str, str], folder: Path) -> dict[str, object]:
        """The line that `baton up` printed. Only clusters without files of a page are shared."""
        settings = sorted(
            f"{name}={value}" for name, value in environment.items() if re.match("BATON_(?!TARGET)", name)
        )
        own = [str(folder)] if "--certs" in arguments else []
        key = (*own, *settings, *arguments)
        if key not in self._running:
            popen = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from baton.cli import main; main()",
                    "up",
                    "--port",
                    "0",
                    "--http-port",
                    "0",
                    *arguments,
                ],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            assert popen.stdout is not None
            self._running[key] = popen, json.loads(popen.stdout.readline())
        return self._running[key][1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for popen, _ in self._running.values():
            popen.send_signal(signal.SIGINT)
        for popen, _ in self._running.values():
            popen.communicate(timeout=DEADLINE_S)


def _programs(folder: Path) -> Path:
    """A folder with the program `baton`, as this Python runs it."""
    programs = _new_folder(folder / ".programs")
    baton = programs / "baton"
    baton.write_text(f"#!{sys.executable}\nfrom baton.cli import main\n\nmain()\n")
    baton.chmod(0o755)
    return programs


def _new_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def _until(done: Callable[[], bool], process: Forked) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not done():
        assert process.poll() is None, "the process ended"
        assert time.monotonic() < end_s, "the process is not ready"
        time.sleep(0.05)


def _check(block: Block, command: str, code: int, output: str) -> None:
    assert code == 0, f"{block.where}: {command}\nexit code {code}\n{output[-3000:]}"
