"""The page /ui in a browser: it shows a real cluster, sends a prompt, and calls no server but its gateway."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.install import CLIENTS
from tests.integration.up import Up, interrupt, start_up

SCRIPT = Path(__file__).with_name("browser.py")


@pytest.fixture
def cluster() -> Iterator[Up]:
    """Prompts go to a prefill node, so that the page has transfers to show."""
    up = start_up("--prefill-nodes", "2", "--decode-nodes", "2", BATON_LOCAL_POLICY="strict")
    yield up
    assert interrupt(up) == 0


def test_a_browser_sees_the_cluster_sends_a_prompt_and_sees_its_waterfall(cluster: Up, tmp_path: Path) -> None:
    base = str(cluster.line["http"])
    done = subprocess.run(
        [CLIENTS / "browser" / "bin" / "python", SCRIPT, base, tmp_path], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen["nodes"]) == 4
    assert seen["links"] == 4
    assert seen["answer"]
    assert {"prompt is computed", "KV is transferred", "tokens"} <= set(seen["phases"])
    assert not seen["errors"]
    assert all(each.startswith(f"{base}/") for each in seen["asked"])
    assert (tmp_path / "ui-light.png").stat().st_size > 10_000
