"""The names of attributes keep OpenTelemetry's rules for names."""

import re

from baton.tracing.declared import MEANINGS, Attribute


def test_names_are_lower_case_and_no_name_is_the_beginning_of_another() -> None:
    """Collectors that keep attributes as a tree could not have both."""
    for attribute in Attribute:
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", attribute), attribute
        assert not [other for other in Attribute if other.startswith(f"{attribute}.")], attribute


def test_every_attribute_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Attribute)
