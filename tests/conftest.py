"""What all tests share: one thread per process, so that two cores serve several processes."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
