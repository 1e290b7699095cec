"""What `baton up` shows a person once the cluster serves."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.cluster_log import HEADER
from baton.cli.local_cluster import LocalCluster
from baton.cli.processes import Process, Processes
from baton.cli.up import EXAMPLE_PROMPT, program_name, wait_until_it_cannot_serve, welcome
from baton.client.client import DEFAULT_TARGET
from baton.core.errors import ConfigError


def shown(address: str, http: str | None, certs: Path | None = None) -> str:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gateway = Process("gateway", "gateway", ended, address, http)
    nodes = [Process("decode_node", "decode-0", ended)]
    with Processes(print) as processes:
        return welcome(LocalCluster(gateway, nodes, nodes, processes, "all nodes are paired"), certs)


def test_it_has_the_addresses_one_example_and_the_header_of_the_rows() -> None:
    lines = shown(DEFAULT_TARGET, "http://127.0.0.1:8000").splitlines()
    assert "  page  http://127.0.0.1:8000/ui  nodes, requests and links in the browser" in lines
    assert lines[-1] == HEADER
    assert f'    "{EXAMPLE_PROMPT}"' in lines
    assert any(line.endswith("generate --max-tokens 40 \\") for line in lines)


def test_it_counts_the_nodes_of_each_role() -> None:
    assert shown(DEFAULT_TARGET, None).startswith(
        "Baton serves with 1 prefill node and 1 decode node; all nodes are paired. Ctrl-C ends it."
    )


def test_the_example_names_another_port_and_the_ca() -> None:
    text = shown("127.0.0.1:7107", None, Path("my certs"))
    assert "--target 127.0.0.1:7107 --client-ca 'my certs/ca.crt' --max-tokens 40" in text
    assert "/ui" not in text


@pytest.mark.parametrize(
    ("given", "named"), [(".venv/bin/baton", ".venv/bin/baton"), ("-c", "baton"), ("/x/baton/__main__.py", "baton")]
)
def test_the_example_runs_the_program_as_its_user_did(monkeypatch: pytest.MonkeyPatch, given: str, named: str) -> None:
    monkeypatch.setattr(sys, "argv", [given])
    assert program_name() == named


def test_the_example_is_short_if_the_program_is_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "baton"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert program_name() == "baton"


def test_it_continues_without_a_node_and_ends_without_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with waiting as runs, Processes(print) as processes:
        nodes = [Process(f"{role}_node", f"{role}-0", ended, "host:1") for role in ("prefill", "decode")]
        processes.running += [*nodes, Process("gateway", "gateway", runs)]
        with pytest.raises(ConfigError, match=r"^decode-0 at host:1 .* with exit code 0; no node is left$"):
            wait_until_it_cannot_serve(processes)
    output = capsys.readouterr()
    assert (output.out + output.err).endswith("ended with exit code 0; the cluster continues without it\n")
