"""Every command of every page runs as it stands, or its block's title says why not: `make test-docs`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import to_run
from tests.docs.guides import GUIDES
from tests.docs.terminal import Clusters, Terminal

# A page has many commands, each with a deadline of its own. README.md takes 100 s alone on two cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
TO_RUN = [block for block in to_run() if block.page not in GUIDES]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters() as running:
        yield running


@pytest.mark.parametrize("page", sorted({block.page for block in TO_RUN}))
def test_the_commands_of_a_page_run(page: str, clusters: Clusters, tmp_path: Path) -> None:
    with Terminal(tmp_path, clusters) as terminal:
        for block in TO_RUN:
            if block.page == page:
                terminal.run(block)
