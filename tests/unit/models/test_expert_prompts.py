"""The kernels for prompts' experts on Hopper, which run on no other device: their comparison refuses wrong kernels,
their tiles suit the rows of an expert, and they compile for an H200 and fit its shared memory.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_prompts import FP8, THREE_GROUPS, TWO_GROUPS, PromptTile, choose_tile
from baton.models.kernels.moe.prompts_probe import compare, multiply_in_torch
from baton.tritonlib.hopper_check import HopperKernels, HopperVerdict, check

# Of the compiler's own kind, which the interpreter replaces when a kernel is imported: hence another process.
_SCRIPT = """
import torch
from tests import compile_only
from triton.runtime.jit import JITFunction
compile_only.pytest_configure()
compile_kernel, compiled = JITFunction.run, []

def compile_and_keep(kernel, *arguments, **options):
    compiled.append(compile_kernel(kernel, *arguments, **options))
    return compiled[-1]

JITFunction.run = compile_and_keep
from baton.models.kernels.moe.prompts_probe import compare_on_hopper

for _ in compare_on_hopper(torch.device("cpu")):
    gate_up, down = compiled[-2:]
    for kernel in (gate_up, down):
        assert "multiply_grouped" in kernel.metadata.name, kernel.metadata.name
        assert kernel.metadata.shared <= 227 * 1024, kernel.metadata
        assert "wgmma.mma_async" in kernel.asm["ptx"]
"""


def verdict(*, wrong: bool) -> HopperVerdict:
    def multiply(
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        tile: PromptTile,
    ) -> Tensor:
        out_SD = multiply_in_torch(x_TD, weights_TK, experts_TK, gate_up, down).bfloat16()
        if wrong and tile is FP8:
            out_SD[-1, -1] += out_SD.abs().max() / 8
        return out_SD

    return check(HopperKernels("experts", lambda device: compare(device, multiply)), torch.device("cpu"))


def test_a_right_kernel_passes_and_one_wrong_number_is_refused() -> None:
    assert verdict(wrong=False).passed
    assert not verdict(wrong=True).passed


@pytest.mark.parametrize(
    ("mean", "channels", "tile"),
    [
        (19, 2048, None),
        (20, 2048, TWO_GROUPS),
        (96, 7168, TWO_GROUPS),
        (160, 4096, THREE_GROUPS),
        (160, 7168, None),
        (768, 2048, TWO_GROUPS),
    ],
)
def test_tiles_suit_the_tokens_of_an_expert(mean: int, channels: int, tile: PromptTile | None) -> None:
    assert choose_tile(64 * mean, 64, channels, is_fp8=False) is tile
    assert choose_tile(64 * mean, 64, channels, is_fp8=True) is (None if mean < 20 else FP8)


@pytest.mark.slow
def test_the_kernels_compile_and_fit_the_shared_memory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
