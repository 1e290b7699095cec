"""Memory of the host for entries, on a machine without a GPU."""

import pytest

from baton.core.errors import ConfigError
from kvtransfer.movers.host_pages import HostPages


def test_pages_are_zeroed_and_outlive_their_maker_while_a_part_is_in_use() -> None:
    pages = HostPages(1 << 30, pinned=False)
    assert pages.tensor.numel() == 1 << 30
    assert pages.tensor.data_ptr() % 4096 == 0
    assert not pages.tensor[-(1 << 16) :].any()
    pages.tensor[-1] = 7
    part = pages.tensor[-2:]
    pages.close()
    del pages
    assert part.tolist() == [0, 7]


def test_more_than_the_machine_can_give_is_an_error_with_its_cure() -> None:
    with pytest.raises(ConfigError, match="smaller --host-cache-gib") as error:
        HostPages(1 << 62, pinned=False)
    assert (error.value.field, error.value.value) == ("host_cache_gib", str(float(1 << 32)))
