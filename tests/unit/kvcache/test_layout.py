"""How a node chooses its layout, and the meaning of a layout's name."""

import pytest

from baton.core.errors import ConfigError
from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout, LayoutChoice, parse_layout


def test_the_default_layout_is_nhd() -> None:
    choice = LayoutChoice(mla=False)
    assert (choice.get_kv_cache_layout(), choice.source) == (KVCacheLayout.NHD, "default")


def test_a_preference_of_transport_or_backend_beats_the_default() -> None:
    choice = LayoutChoice(mla=False, preferred=KVCacheLayout.HND)
    assert (choice.get_kv_cache_layout(), choice.source) == (KVCacheLayout.HND, "preferred")


def test_a_setting_beats_preferences() -> None:
    choice = LayoutChoice(mla=False, setting="BLNHC", preferred=KVCacheLayout.HND)
    assert (choice.get_kv_cache_layout(), choice.source) == (KVCacheLayout.BLNHC, "setting")


def test_an_empty_setting_is_ignored() -> None:
    choice = LayoutChoice(mla=False, setting="", preferred=KVCacheLayout.HND)
    assert choice.source == "preferred"


@pytest.mark.parametrize("layout", ["BLHNC", KVCacheLayout.BLHNC])
def test_the_programs_override_beats_all_and_can_be_removed(layout: str | KVCacheLayout) -> None:
    choice = LayoutChoice(mla=False, setting="BLNHC", preferred=KVCacheLayout.HND)
    choice.set_kv_cache_layout(layout)
    assert (choice.get_kv_cache_layout(), choice.source) == (KVCacheLayout.BLHNC, "override")
    choice.set_kv_cache_layout(None)
    assert choice.source == "setting"


@pytest.mark.parametrize("name", ["NHDX", "", "L K B N H C"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_layout(name, mla=False)
    assert error.value.field == "kv_cache_layout"
    assert set(error.value.allowed) == {"NHD", "HND", "BLNHC", "BLHNC", "LBNC", "BLNC"}


@pytest.mark.parametrize(
    ("name", "gqa", "mla"),
    [
        ("nhd", "NHD", "LBNC"),
        (" HND ", "HND", "LBNC"),
        ("BLNHC", "BLNHC", "BLNC"),
        ("BLHNC", "BLHNC", "BLNC"),
        ("LBNC", "NHD", "LBNC"),
        ("BLNC", "BLNHC", "BLNC"),
    ],
)
def test_every_name_means_a_layout_for_both_kinds_of_cache(name: str, gqa: str, mla: str) -> None:
    assert parse_layout(name, mla=False).name == gqa
    assert parse_layout(name, mla=True).name == mla


def test_layouts_are_distinct_permutations_and_each_kind_has_its_own() -> None:
    for layout in KVCacheLayout:
        assert sorted(layout.memory_order) == list(range(6))
    assert len(set(KVCacheLayout)) == 6
    assert set(GQA_LAYOUTS) | set(MLA_LAYOUTS) == set(KVCacheLayout)
