"""Pages that are written from code are up to date."""

from pkgutil import resolve_name

import pytest

from docs import attention, configuration


def test_the_configuration_page_is_made_from_the_settings() -> None:
    assert configuration.PAGE.read_text() == configuration.page(), "run `make docs`"


def test_the_page_of_attention_backends_is_made_from_their_capabilities() -> None:
    assert attention.PAGE.read_text() == attention.page(), "run `make docs`"


@pytest.mark.parametrize("name", [ours for _, ours in attention.NAMES])
def test_every_name_in_its_table_of_names_exists(name: str) -> None:
    assert resolve_name(name) is not None
