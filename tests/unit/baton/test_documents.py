"""The pages that are made from code are up to date."""

from docs import configuration


def test_the_configuration_page_is_made_from_the_settings() -> None:
    assert configuration.PAGE.read_text() == configuration.page(), "run `make docs`"
