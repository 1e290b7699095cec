"""Tokens that were read into a cache, counted by the place that had them."""

import pytest

from baton.core.kv_entries import loaded_tokens
from baton.core.types import NOTHING_LOADED, LoadedTokens


@pytest.mark.parametrize(
    ("sources", "tokens", "wanted"),
    [
        ((), 0, NOTHING_LOADED),
        (("host", "host", "file", "peer"), 256, LoadedTokens(host=128, file=64, peer=64)),
        (("host", "mooncake"), 128, LoadedTokens(host=64, store=64)),
        (("host", "peer"), 96, LoadedTokens(host=64, peer=32)),
        (("host", "peer"), 48, LoadedTokens(host=48)),
        (("host", "file"), 320, LoadedTokens(host=64, file=256)),
    ],
    ids=[
        "nothing",
        "each-entry",
        "a-shared-store",
        "part-of-the-last-entry",
        "part-of-the-first",
        "a-state-has-the-rest",
    ],
)
def test_tokens_count_where_their_entry_was(sources: tuple[str, ...], tokens: int, wanted: LoadedTokens) -> None:
    loaded = loaded_tokens(sources, tokens)
    assert (loaded, loaded.total) == (wanted, tokens)


def test_the_slowest_places_are_left_out_first() -> None:
    loaded = LoadedTokens(host=64, file=32, store=16, peer=8)
    assert [loaded.at_most(tokens) for tokens in (200, 114, 100, 70, 5)] == [
        loaded,
        LoadedTokens(64, 32, 16, 2),
        LoadedTokens(64, 32, 4),
        LoadedTokens(64, 6),
        LoadedTokens(5),
    ]
