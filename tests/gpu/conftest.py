"""Every test starts with the first GPU as the current one, whatever the test before it chose."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _first_gpu_is_current() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
