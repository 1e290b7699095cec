"""Which backend is chosen, and what an operator is told when none can be."""

from dataclasses import replace

import pytest

from attention.backend import AttentionFeature, AttentionNeeds
from attention.layout import KVCacheLayout
from attention.platform import Platform
from attention.selection import select_backend
from attention.spec import KVKind
from baton.errors import ConfigError

LLAMA = AttentionNeeds(KVKind.GQA, "cpu", "bfloat16", 128, 16, KVCacheLayout.HND)
DEEPSEEK = AttentionNeeds(KVKind.MLA, "cpu", "bfloat16", 576, 64, KVCacheLayout.BLNC)


@pytest.mark.parametrize(
    ("needs", "name"),
    [
        (LLAMA, "TORCH_SDPA"),
        (replace(LLAMA, features=frozenset({AttentionFeature.SLIDING_WINDOW})), "TORCH_SDPA"),
        (DEEPSEEK, "TORCH_MLA"),
    ],
)
def test_the_first_backend_that_meets_the_needs_is_chosen(needs: AttentionNeeds, name: str) -> None:
    assert select_backend(needs).capabilities.name == name
    assert select_backend(needs, forced=name.lower()).capabilities.name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"BATON_ATTENTION_BACKEND .* is 'FAST'") as error:
        select_backend(LLAMA, forced="FAST")
    assert error.value.allowed == ("TORCH_SDPA", "TORCH_MLA")


def test_when_none_fits_every_backend_is_listed_with_every_reason() -> None:
    needs = replace(DEEPSEEK, device="cuda", dtype="int4", features=frozenset({AttentionFeature.SLIDING_WINDOW}))
    with pytest.raises(ConfigError) as error:
        select_backend(needs, platform=Platform("cuda", compute_capability=(9, 0)))
    sdpa, mla = error.value.message.split(": ", 1)[1].split(" | ")
    assert sdpa == (
        "TORCH_SDPA: kind mla is not gqa; device cuda is not among cpu; "
        "dtype int4 is not among bfloat16, float16, float32; kv_dtype int4 is not among bfloat16, float16, float32; "
        "layout BLNC is not among BLHNC, BLNHC, HND, NHD"
    )
    assert mla == (
        "TORCH_MLA: device cuda is not among cpu; dtype int4 is not among bfloat16, float16, float32; "
        "kv_dtype int4 is not among bfloat16, float16, float32; no sliding_window"
    )
    assert error.value.allowed == ()


def test_a_forced_backend_that_does_not_fit_is_refused_and_the_fitting_one_named() -> None:
    with pytest.raises(ConfigError, match="TORCH_MLA does not serve this model here") as error:
        select_backend(LLAMA, forced="TORCH_MLA")
    assert "kind gqa is not mla" in str(error.value)
    assert error.value.allowed == ("TORCH_SDPA",)
    assert "unset BATON_ATTENTION_BACKEND" in error.value.cure


def test_a_context_workspace_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_workspace_tokens is 0"):
        select_backend(DEEPSEEK, context_workspace_tokens=0)
