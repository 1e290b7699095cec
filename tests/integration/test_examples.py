"""Every example runs as it stands: programs against a cluster, scripts with a cluster of their own."""

import asyncio
import json
import os
import random
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.settings.environment import child_environment
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, machines
from tests.unit.models.lora import save_adapter

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
# What a script must print besides what processes log.
SCRIPTS = {"two_gpus.sh": "prefill", "unlike_layouts.sh": "both clusters gave the same text"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A cluster with one adapter."""
    adapter = save_adapter(LLAMA, tmp_path_factory.mktemp("adapters") / "sql", seed=1)
    node: Flags = {"adapter": f"sql={adapter}"}
    with machines() as start:
        prefill, decode = start.nodes(("prefill", node), ("decode", node))
        yield start.gateway([prefill], [decode], http_listen="127.0.0.1:0")


async def run(command: Sequence[str], **environment: str) -> str:
    """What the command prints."""
    program = await asyncio.create_subprocess_exec(
        *command,
        env=child_environment(**environment),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(program.communicate(), DEADLINE_S)
    assert program.returncode == 0, err.decode()
    return out.decode()


def environment(gateway: Process) -> dict[str, str]:
    return {"BATON_TARGET": gateway.address, "OPENAI_BASE_URL": f"{gateway.http}/v1", "MPLBACKEND": "agg"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
async def test_a_program_prints_what_the_model_says(gateway: Process, program: Path) -> None:
    printed = await run([sys.executable, str(program)], **environment(gateway))
    assert printed.strip()


async def test_the_agent_calls_its_tool(gateway: Process) -> None:
    printed = await run([sys.executable, str(FOLDER / "agent.py")], **environment(gateway))
    assert printed.startswith("calls look_up {")


async def test_adapters_are_listed_with_their_outputs(gateway: Process) -> None:
    lines = (await run([sys.executable, str(FOLDER / "adapters.py")], **environment(gateway))).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["llama (model)", "sql (adapter of llama)"]


async def test_the_notebooks_cells_run_in_order(gateway: Process, tmp_path: Path) -> None:
    notebook = json.loads((FOLDER / "latency.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs of some other machine"
    (tmp_path / "cells.py").write_text("\n\n".join(cells))
    printed = await run([sys.executable, str(tmp_path / "cells.py")], **environment(gateway))
    assert printed.count("tokens: path ") == 4


def unused_port() -> int:
    """A gateway's port whose cluster, with the ports that a script derives from it, is free."""
    while True:  # below the range from which the kernel takes ports of outgoing connections
        port = random.randrange(15000, 25000)
        try:
            for each in (port, port + 1, port + 2, port + 1000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
        except OSError:
            continue
        return port


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(SCRIPTS))
async def test_a_script_starts_its_cluster_and_ends_it(script: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = await run(["bash", str(FOLDER / script)], PATH=path, PORT=str(unused_port()), ONCE="1")
    assert SCRIPTS[script] in printed


def test_every_example_is_run_and_listed() -> None:
    elsewhere = {"helm", "kubernetes", "several-models"}  # tests/deploy and tests/clients
    tested = {path.name for path in PROGRAMS} | SCRIPTS.keys() | {"latency.ipynb"} | elsewhere
    here = {path.name for path in FOLDER.iterdir()} - {"README.md", "__pycache__"}
    assert here == tested
    listed = (FOLDER / "README.md").read_text()
    assert all(f"]({name}" in listed for name in here)
