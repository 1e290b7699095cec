"""Which backend is chosen, and the log line for the operator: why each backend serves or does not."""

import logging
from dataclasses import replace

import pytest

from attention.backend import AttentionFeature, AttentionNeeds
from attention.backends.triton_attn import TritonAttention
from attention.parameters import AttentionParameters
from attention.platform import OPTIONAL_PACKAGES, Platform
from attention.selection import BACKENDS, fitting_backends, reasons_against, select_backend, selection_report
from baton.core.errors import ConfigError
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind

LAYERS = {"layers.0": AttentionParameters(scale=0.1), "layers.1": AttentionParameters(scale=0.1)}
LLAMA = AttentionNeeds(KVKind.GQA, "cpu", "bfloat16", 128, 16, KVCacheLayout.HND, layers=LAYERS)
DEEPSEEK = AttentionNeeds(KVKind.MLA, "cpu", "bfloat16", 576, 64, KVCacheLayout.BLNC, layers=LAYERS)
NAMES = tuple(backend.capabilities.name for backend in BACKENDS)

CPU = Platform("cpu")
INTERPRETER = Platform("cpu", triton_interpreted=True)
BARE_H200 = Platform("cuda", compute_capability=(9, 0), num_sms=132)
H200 = replace(BARE_H200, packages=frozenset(OPTIONAL_PACKAGES))
A100 = replace(H200, compute_capability=(8, 0), num_sms=108)
V100 = replace(H200, compute_capability=(7, 0), num_sms=80)


def on_gpu(needs: AttentionNeeds, *features: AttentionFeature, **changes: object) -> AttentionNeeds:
    return replace(needs, device="cuda:0", features=frozenset(features), **changes)  # type: ignore[arg-type]


def chosen(needs: AttentionNeeds, platform: Platform, forced: str | None = None) -> str:
    return selection_report(needs, platform, forced=forced).split(",")[0].rpartition(" ")[2]


def verdicts(needs: AttentionNeeds, platform: Platform) -> dict[str, str]:
    lines = selection_report(needs, platform).splitlines()[1:]
    return dict(line.strip().split(": ", 1) for line in lines)


def windows(*sizes: int | None) -> dict[str, AttentionParameters]:
    return {f"layers.{index}": AttentionParameters(scale=0.1, sliding_window=size) for index, size in enumerate(sizes)}


@pytest.mark.parametrize("platform", [CPU, INTERPRETER], ids=["cpu", "interpreter"])
@pytest.mark.parametrize(
    ("needs", "name"),
    [
        (LLAMA, "TORCH_SDPA"),
        (replace(LLAMA, features=frozenset({AttentionFeature.SLIDING_WINDOW})), "TORCH_SDPA"),
        (DEEPSEEK, "TORCH_MLA"),
    ],
)
def test_a_cpu_runs_plain_torch(needs: AttentionNeeds, name: str, platform: Platform) -> None:
    assert select_backend(needs, platform=platform).capabilities.name == name
    assert select_backend(needs, platform=platform, forced=name.lower()).capabilities.name == name


@pytest.mark.parametrize(("needs", "name"), [(LLAMA, "TRITON_ATTN"), (DEEPSEEK, "TRITON_MLA")])
def test_kernels_run_in_the_interpreter_only_when_forced(needs: AttentionNeeds, name: str) -> None:
    assert chosen(needs, INTERPRETER, forced=name) == name
    with pytest.raises(ConfigError, match="device cpu is not among cuda"):
        selection_report(needs, CPU, forced=name)


@pytest.mark.parametrize(
    ("needs", "platform", "name"),
    [
        (on_gpu(LLAMA), H200, "TRITON_ATTN"),
        (on_gpu(LLAMA), A100, "TRITON_ATTN"),
        (on_gpu(LLAMA), BARE_H200, "TRITON_ATTN"),
        (on_gpu(DEEPSEEK), H200, "FLASHINFER_MLA"),
        (on_gpu(DEEPSEEK), A100, "FLASHINFER_MLA"),
        (on_gpu(DEEPSEEK), BARE_H200, "TRITON_MLA"),
        (on_gpu(DEEPSEEK, num_heads=32), replace(H200, hopper_kernels=True), "TRITON_MLA"),
        (on_gpu(DEEPSEEK, num_heads=64), replace(H200, hopper_kernels=True), "FLASHINFER_MLA"),
        (on_gpu(DEEPSEEK, num_heads=32), H200, "FLASHINFER_MLA"),
        (on_gpu(DEEPSEEK, dtype="float32"), H200, "TRITON_MLA"),
        (on_gpu(DEEPSEEK, head_size=320), H200, "TRITON_MLA"),
    ],
)
def test_a_gpu_runs_the_fastest_backend_that_its_packages_allow(
    needs: AttentionNeeds, platform: Platform, name: str
) -> None:
    assert chosen(needs, platform) == name


@pytest.mark.parametrize(
    "feature",
    [AttentionFeature.CHUNKED_LOCAL, AttentionFeature.ALIBI, AttentionFeature.SINKS],
)
def test_a_feature_that_a_forced_backend_lacks_is_its_reason(feature: AttentionFeature) -> None:
    needs = on_gpu(LLAMA, feature)
    assert chosen(needs, H200) == "TRITON_ATTN"
    assert verdicts(needs, H200)["FLASHINFER"] == f"no {feature}"
    with pytest.raises(ConfigError, match=f"FLASHINFER: no {feature}"):
        selection_report(needs, H200, forced="FLASHINFER")


def test_only_one_backend_serves_block_sparsity() -> None:
    assert chosen(on_gpu(LLAMA, AttentionFeature.BLOCK_SPARSE), H200) == "BLOCKSPARSE_FLASH_ATTN"


def test_layers_with_different_windows_exclude_backends_with_one_plan_for_all_layers() -> None:
    needs = on_gpu(LLAMA, AttentionFeature.SLIDING_WINDOW, layers=windows(512, None))
    assert verdicts(needs, H200)["TRITON_ATTN"] == "chosen"
    assert "layers disagree" in verdicts(needs, H200)["FLASHINFER"]
    assert verdicts(replace(needs, layers=windows(512, 512)), H200)["FLASHINFER"] == "fits"


def test_a_missing_package_is_a_reason_with_the_command_that_installs_it() -> None:
    of = verdicts(on_gpu(LLAMA, block_size=256, layout=KVCacheLayout.NHD), BARE_H200)
    command = "pip install 'baton-serving[attention]'"
    assert of["FLASHINFER"] == f"package flashinfer is not installed: {command}"
    assert of["XFORMERS"] == f"package xformers is not installed: {command}"
    command = "pip install --no-build-isolation 'baton-serving[flash-attn]'"
    assert of["FLASH_ATTN"] == f"package flash_attn is not installed: {command}"
    with pytest.raises(ConfigError, match=r"pip install 'baton-serving\[attention\]'"):
        selection_report(on_gpu(LLAMA), BARE_H200, forced="FLASHINFER")


@pytest.mark.parametrize("name", ["FLASH_ATTN", "XFORMERS"])
def test_backends_that_want_other_blocks_serve_when_forced(name: str) -> None:
    needs = on_gpu(LLAMA, block_size=256, layout=KVCacheLayout.NHD)
    assert chosen(needs, H200, forced=name) == name
    with pytest.raises(ConfigError, match="block_size 8 is not among"):
        selection_report(on_gpu(LLAMA, block_size=8, layout=KVCacheLayout.NHD), H200, forced=name)


def test_an_old_gpu_is_refused_by_its_compute_capability() -> None:
    with pytest.raises(ConfigError, match=r"the GPU's compute capability is 7\.0, below 8\.0"):
        selection_report(on_gpu(LLAMA), V100)


def test_the_report_has_every_backend_and_the_log_has_one_line_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    report = selection_report(LLAMA, INTERPRETER)
    assert report.startswith("attention backend TORCH_SDPA, the first that fits:\n")
    of = verdicts(LLAMA, INTERPRETER)
    assert tuple(of) == NAMES
    assert of["TORCH_SDPA"] == "chosen"
    assert of["TRITON_ATTN"] == "fits"
    assert of["TORCH_MLA"] == "kind gqa is not mla; layout HND is not among BLNC, LBNC"
    with caplog.at_level(logging.DEBUG):
        select_backend(LLAMA, platform=INTERPRETER)
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert levels == [("INFO", "attention backend TORCH_SDPA, the first that fits"), ("DEBUG", report)]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"BATON_ATTENTION_BACKEND .* is 'FAST'") as error:
        select_backend(LLAMA, platform=CPU, forced="FAST")
    assert error.value.allowed == NAMES


def test_when_none_fits_every_backend_is_listed_with_every_reason() -> None:
    needs = on_gpu(DEEPSEEK, AttentionFeature.SLIDING_WINDOW, dtype="int4")
    with pytest.raises(ConfigError) as error:
        select_backend(needs, platform=BARE_H200)
    listed = error.value.message.split(": ", 1)[1].split(" | ")
    assert tuple(line.split(":")[0] for line in listed) == NAMES
    sdpa, mla = (line.split(": ", 1)[1].split("; ") for line in listed[:2])
    assert sdpa[:2] == ["kind mla is not gqa", "device cuda is not among cpu"]
    assert "layout BLNC is not among BLHNC, BLNHC, HND, NHD" in sdpa
    assert mla[:2] == ["device cuda is not among cpu", "dtype int4 is not among bfloat16, float16, float32"]
    assert mla[-1] == "no sliding_window"
    assert error.value.allowed == ()


def test_a_forced_backend_that_does_not_fit_is_refused_and_the_fitting_ones_named() -> None:
    with pytest.raises(ConfigError, match="TORCH_MLA does not serve this model here") as error:
        select_backend(LLAMA, platform=CPU, forced="TORCH_MLA")
    assert "kind gqa is not mla" in str(error.value)
    assert error.value.allowed == tuple(each.capabilities.name for each in fitting_backends(LLAMA, CPU))
    assert "unset BATON_ATTENTION_BACKEND" in error.value.cure


def test_a_context_workspace_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_workspace_tokens is 0"):
        select_backend(DEEPSEEK, platform=CPU, context_workspace_tokens=0)


def test_a_gpu_that_cannot_convert_e4m3_is_refused_it_and_keeps_e5m2() -> None:
    needs = replace(on_gpu(LLAMA), kv_dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match=r"TRITON_ATTN: the GPU's compute capability is 8\.0, below 8\.9"):
        select_backend(needs, platform=A100)
    against = reasons_against(TritonAttention.capabilities, replace(needs, kv_dtype="float8_e5m2"), A100)
    assert against == ()


@pytest.mark.parametrize(
    ("needs", "platform", "name"),
    [
        (LLAMA, CPU, "TORCH_SDPA"),
        (DEEPSEEK, CPU, "TORCH_MLA"),
        (on_gpu(LLAMA), H200, "TRITON_ATTN"),
        (on_gpu(DEEPSEEK), H200, "TRITON_MLA"),
    ],
)
def test_where_results_must_not_depend_on_the_batch_backends_that_do_are_refused(
    needs: AttentionNeeds, platform: Platform, name: str
) -> None:
    needs = replace(needs, batch_invariant=True)
    assert chosen(needs, platform) == name
    refused = verdicts(needs, platform)["FLASHINFER"]
    assert refused.endswith("its results depend on the batch")
