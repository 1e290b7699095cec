"""Paths with bytes that are no UTF-8 and with control characters work, and errors that name them are one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind
from tests.integration.cluster import DEADLINE_S, LLAMA, Machines
from tests.integration.up import BATON
from tests.unit.models.lora import save_adapter

STRANGE = os.fsdecode(b"caf\xe9 \xff\n\x1b[31m")
SHOWN = r"caf\udce9 \udcff\n\x1b[31m", r"caf\xe9 \xff\n\x1b[31m"
JSON = Grammar(GrammarKind.JSON_OBJECT)
# Python takes the locale C for UTF-8 unless it is told not to.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    (tmp_path / STRANGE).mkdir()
    return tmp_path / STRANGE


@pytest.mark.slow
async def test_a_cluster_serves_out_of_a_directory_of_any_name(start: Machines, strange: Path) -> None:
    model = strange / STRANGE
    shutil.copytree(LLAMA, model)
    adapter = save_adapter(LLAMA, strange / "adapter", seed=1)
    watched = strange / "watched"
    save_adapter(LLAMA, watched / STRANGE, seed=2)
    flags: dict[str, object] = {
        "model": model,
        "adapter": f"one={adapter},{watched}",
        "ready_file": strange / "node.json",
    }
    (decode,) = start.nodes(("decode", {**flags, "tensor_parallel_size": 2}))
    assert json.loads((strange / "node.json").read_bytes())["address"] == decode.address
    shutil.copy(LLAMA / "chat_template.jinja", strange / "template")
    template = strange / "template"
    gateway = start.gateway([], [decode], model=model, chat_template=template, local_policy="local")
    async with AsyncClient(gateway.address) as client:
        (base, one) = await client.list_models()
        assert (base.name, one.name) == (SHOWN[1], "one")
        found = await client.complete("Once", SamplingParams(max_tokens=8, grammar=JSON), model="one")
    assert found.text.startswith("{")


def error_line(*command: str, code: int) -> None:
    """There is one line on stderr, of ASCII; the directory's name is in it, in one of its forms."""
    environment = {**os.environ, **ASCII}
    done = subprocess.run(command, capture_output=True, check=False, env=environment, timeout=DEADLINE_S)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.decode("ascii").splitlines()
    assert any(shown in line for shown in SHOWN), line


def test_a_setting_that_names_a_strange_path_has_one_line(strange: Path) -> None:
    gateway = (sys.executable, "-m", "baton.gateway", "--decode", "127.0.0.1:1", "--model", str(LLAMA))
    for flags in (("--model", str(strange)), ("--ready-file", f"{strange}/none/ready"), ("--name", STRANGE)):
        error_line(*gateway, *flags, code=2)


def test_a_command_that_names_a_strange_path_has_one_line(strange: Path) -> None:
    (strange / "latin-1").write_bytes(b"caf\xe9\n")
    for command in (
        ("generate", "--file", str(strange / "latin-1")),
        ("key", "alice", "--file", f"{strange}/none/keys"),
        ("up", "--port", "0", "--model", f"{strange}/none"),
    ):
        error_line(*BATON, *command, code=2 if "generate" in command else 1)


def test_what_a_command_prints_fits_any_locale(strange: Path) -> None:
    command = [*BATON, "certs", f"{strange}/certs"]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, **ASCII}, timeout=DEADLINE_S)
    assert done.stderr == b""
    assert done.stdout.startswith(b"wrote certificates to ")


@pytest.mark.slow
def test_up_shows_an_error_of_the_model_once_as_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["None"]}')
    command = [*BATON, "up", "--port", "0", "--http-port", "0", "--prefill-nodes", "2", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "architectures" in line]
    assert lines == done.stderr.splitlines()[-1:]
    assert lines[0].startswith(f"baton: {tmp_path}/config.json: architectures is ")
