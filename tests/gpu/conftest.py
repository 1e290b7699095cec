"""The current GPU of a test process is the first one, whatever the test before it has chosen."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _first_gpu_is_current() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
