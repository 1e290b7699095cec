"""Every example runs as it stands, against a cluster that BATON_TARGET names."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.settings.environment import child_environment
from tests.integration.cluster import DEADLINE_S, machines

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Process]:
    with machines() as start:
        prefill, decode = start.nodes(("prefill", {}), ("decode", {}))
        yield start.gateway([prefill], [decode])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
async def test_an_example_prints_what_the_model_says(gateway: Process, example: Path) -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        str(example),
        env=child_environment(BATON_TARGET=gateway.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(program.communicate(), DEADLINE_S)
    assert (program.returncode, err.decode()) == (0, "")
    assert out.strip()
