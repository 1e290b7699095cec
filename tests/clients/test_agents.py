"""Released coding agents, each asked once without a terminal: the model calls a tool, the agent runs it and goes on.

What they send differs between releases, so these are the real programs. Their model is `scripted_model`.
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.install import CLIENTS
from tests.clients.scripted_model import Call, write_scripted_model
from tests.integration.cluster import DEADLINE_S
from tests.integration.up import Up, interrupt, start_up

BIN = CLIENTS / "agents" / "node_modules" / ".bin"
PROMPT = "Make a file"
ANSWER = "The file is there now."
# The shell tool of each agent. Claude Code and Continue have one of the same name.
CALLS = [
    Call("Bash", {"command": "touch made_by_bash", "description": "Makes a file"}),
    Call("bash", {"description": "Makes a file", "command": "touch made_by_opencode"}),
    Call("exec_command", {"cmd": "touch made_by_codex"}),
    Call("run_shell_command", {"description": "Makes a file", "command": "touch made_by_qwen"}),
]


@dataclass(frozen=True)
class Asked:
    """What an agent printed, and the folder that it worked in."""

    output: str
    folder: Path


@dataclass(frozen=True)
class Agents:
    """Starts agents against one gateway, each in a home and a folder of its own."""

    http: str
    folder: Path

    def ask(self, program: str, *arguments: str, files: dict[str, str] | None = None, **variables: str) -> Asked:
        """Runs an agent to its end.

        Args:
            files: written into its home, by path.
        """
        home, work = self.folder / "home", self.folder / "work"
        work.mkdir(parents=True)
        for name, content in (files or {}).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(content)
        home.mkdir(exist_ok=True)
        done = subprocess.run(
            [BIN / program, *arguments],
            cwd=work,
            env={"PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]), "HOME": str(home), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Asked(done.stdout, work)

    def refusals(self) -> dict[str, float]:
        """The gateway's counts of errors that are not zero, by series."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        errors = ("baton_request_errors_total{", "baton_http_errors_total{")
        counts = dict(line.rsplit(" ", 1) for line in lines if line.startswith(errors))
        assert counts
        return {series: float(count) for series, count in counts.items() if float(count)}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    checkpoint = write_scripted_model(tmp_path_factory.mktemp("models") / "scripted", CALLS, ANSWER)
    up = start_up("--model", str(checkpoint))
    yield up
    assert interrupt(up) == 0


@pytest.fixture
def agents(scripted: Up, tmp_path: Path) -> Iterator[Agents]:
    found = Agents(str(scripted.line["http"]), tmp_path)
    yield found
    assert found.refusals() == {}


def made(asked: Asked) -> list[str]:
    return [path.name for path in asked.folder.glob("made_by_*")]


@pytest.mark.slow
def test_claude_code_calls_a_tool_and_its_second_request_finds_the_first_ones_prompt_cached(agents: Agents) -> None:
    asked = agents.ask(
        "claude",
        *("--print", PROMPT, "--output-format", "json", "--allowedTools", "Bash(touch:*)"),
        ANTHROPIC_BASE_URL=agents.http,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="scripted",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    result = json.loads(asked.output)
    assert (result["result"], result["is_error"], result["num_turns"]) == (ANSWER, False, 2)
    assert result["permission_denials"] == []
    assert result["usage"]["cache_read_input_tokens"] > 10_000
    assert made(asked) == ["made_by_bash"]


@pytest.mark.slow
def test_codex_calls_a_tool(agents: Agents) -> None:
    config = f"""
        model = "scripted"
        model_provider = "baton"
        [model_providers.baton]
        name = "Baton"
        base_url = "{agents.http}/v1"
        wire_api = "responses"
        [analytics]
        enabled = false
    """
    # Its sandbox needs rights of the kernel that containers do not have.
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    asked = agents.ask("codex", "exec", *free, PROMPT, files={".codex/config.toml": config})
    assert asked.output.strip() == ANSWER
    assert made(asked) == ["made_by_codex"]


@pytest.mark.slow
def test_opencode_calls_a_tool(agents: Agents) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{agents.http}/v1"},
        "models": {"scripted": {"name": "scripted"}},
    }
    config = {"autoupdate": False, "share": "disabled", "provider": {"baton": provider}}
    asked = agents.ask(
        "opencode",
        *("run", "--model", "baton/scripted", PROMPT),
        files={".config/opencode/opencode.json": json.dumps(config)},
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    assert asked.output.strip() == ANSWER
    assert made(asked) == ["made_by_opencode"]


@pytest.mark.slow
def test_qwen_code_calls_a_tool(agents: Agents) -> None:
    asked = agents.ask(
        "qwen",
        *("--auth-type", "openai", "--yolo", "--prompt", PROMPT),
        files={".qwen/settings.json": json.dumps({"privacy": {"usageStatisticsEnabled": False}})},
        OPENAI_BASE_URL=f"{agents.http}/v1",
        OPENAI_API_KEY="none",
        OPENAI_MODEL="scripted",
    )
    assert asked.output.strip() == ANSWER
    assert made(asked) == ["made_by_qwen"]


@pytest.mark.slow
def test_continue_calls_a_tool(agents: Agents) -> None:
    config = f"""
name: baton
version: 1.0.0
schema: v1
models:
  - name: scripted
    provider: openai
    model: scripted
    apiBase: {agents.http}/v1
    apiKey: none
    roles: [chat]
"""
    place = agents.folder / "home" / "config.yaml"
    asked = agents.ask(
        "cn",
        *("--config", str(place), "--auto", "--print", PROMPT),
        files={place.name: config},
        CONTINUE_TELEMETRY_ENABLED="0",
    )
    assert asked.output.strip() == ANSWER
    assert made(asked) == ["made_by_bash"]
