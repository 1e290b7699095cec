"""With a version of Triton that nobody measured, kernels for Hopper are used only if their results are right."""

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from baton.tritonlib.hopper_check import (
    MEASURED_VERSIONS,
    HopperKernels,
    Pair,
    check,
    has_hopper_kernels,
    may_use,
    probe_of,
)

CPU = torch.device("cpu")
UNMEASURED = "99.1.0"
EXPECTED = torch.tensor([1.0, -4.0, 2.0])


def yielding(*results: torch.Tensor) -> HopperKernels:
    def compare(device: torch.device) -> Iterator[Pair]:
        for result in results:
            yield result.to(device), EXPECTED

    return HopperKernels("a test", compare)


def raising() -> HopperKernels:
    def compare(_: torch.device) -> Iterator[Pair]:
        yield EXPECTED, EXPECTED
        raise AssertionError("this layout is not supported")

    return HopperKernels("a test", compare)


def never_compared() -> HopperKernels:
    def compare(_: torch.device) -> Iterator[Pair]:
        raise AssertionError("compared")

    return HopperKernels("a test", compare)


def test_equal_results_pass() -> None:
    verdict = check(yielding(EXPECTED, EXPECTED), CPU)
    assert verdict.passed
    assert verdict.difference == 0.0


def test_the_difference_is_the_largest_of_any_element_of_any_result() -> None:
    verdict = check(yielding(EXPECTED + 0.04, EXPECTED + torch.tensor([0.0, 0.0, 1.0]), EXPECTED), CPU)
    assert not verdict.passed
    assert verdict.difference == 0.25


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_fails(wrong: float) -> None:
    assert not check(yielding(torch.tensor([1.0, -4.0, wrong])), CPU).passed


def test_an_exception_fails_and_is_the_reason() -> None:
    verdict = check(raising(), CPU)
    assert not verdict.passed
    assert verdict.reason == "AssertionError: this layout is not supported"


@pytest.mark.parametrize("version", [f"{version}7" for version in MEASURED_VERSIONS])
def test_a_measured_version_needs_no_comparison(version: str) -> None:
    assert may_use(never_compared(), CPU, version=version)


def test_kernels_that_pass_are_used_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert may_use(yielding(EXPECTED), CPU, version=UNMEASURED)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert UNMEASURED in caplog.text


@pytest.mark.parametrize("kernels", [yielding(EXPECTED * 1.1), raising()], ids=["wrong", "raising"])
def test_kernels_that_fail_are_not_used_and_a_warning_names_both_versions(
    kernels: HopperKernels, caplog: pytest.LogCaptureFixture
) -> None:
    assert not may_use(kernels, CPU, version=UNMEASURED)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert UNMEASURED in caplog.text
    assert all(version in caplog.text for version in MEASURED_VERSIONS)


def test_no_other_device_has_them() -> None:
    assert not has_hopper_kernels(CPU, never_compared())


@pytest.mark.parametrize("missing", [probe_of("tritonlib.no_such_module"), probe_of("baton.tritonlib.math", "nothing")])
def test_kernels_that_cannot_be_imported_fail(missing: Callable[[torch.device], Iterable[Pair]]) -> None:
    assert not check(HopperKernels("a test", missing), CPU).passed


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("attention.kernels.mla.probe", "compare_on_hopper"),
        ("attention.kernels.blocksparse.probe", "compare_on_hopper"),
        ("baton.models.kernels.quantized.packed_probe", "compare_products_on_hopper"),
        ("baton.models.kernels.quantized.packed_probe", "compare_experts_on_hopper"),
    ],
)
def test_the_named_comparisons_exist(module: str, function: str) -> None:
    assert callable(getattr(importlib.import_module(module), function))
