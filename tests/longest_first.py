"""A pytest plugin that runs the files of most CPU time first, so that no worker is left with one of them at the end:
`pytest -p tests.longest_first --dist loadfile --no-loadscope-reorder`.

Without it, xdist begins with the files of most tests. Those with one or two tests that take a minute each come last.
"""

import math

import pytest

from tests.cpu_seconds import read


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the order within each file. Files that nobody measured come first, because some of them may be long."""
    spent = read()
    items.sort(key=lambda item: spent.get(item.nodeid.partition("::")[0], math.inf), reverse=True)
