"""The latent kernels with rows in order compile for an H200 at the sizes of DeepSeek-V2-Lite and V3 and fit its shared
memory. Where a decode's members are on the same axis as a prompt's, it has a prompt's additions: the compiler fused the
same ones with products in both. The kernel for selected tokens compiles and fits, too."""

import os
import subprocess
import sys
from pathlib import Path

# Of the compiler's own kind, which the interpreter replaces when a kernel is imported: hence another process.
_SCRIPT = """
import re
import subprocess
from collections import Counter
from pathlib import Path
import torch
import triton
from tests import compile_only
from triton.runtime.jit import JITFunction
from attention.kernels.mla import gathered, hopper, portable
from attention.kernels.mla.merge import merge_splits
from attention.kernels.mla.plan import make_mla_decode_plan

SHARED_MAX = 227 * 1024
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"

compile_only.pytest_configure()
compile_kernel, compiled = JITFunction.run, []

def compile_and_keep(kernel, *arguments, **options):
    compiled.append(compile_kernel(kernel, *arguments, **options))
    return compiled[-1]

JITFunction.run = compile_and_keep

def launch(kernels, heads, tiles):
    plan = make_mla_decode_plan(
        num_heads=heads, latent_channels=512, max_num_reqs=64, max_model_len=8192, num_sms=132, device="cpu",
        split_tokens=512 if heads <= 32 else 4096,
    )
    q_THC, out = (torch.zeros(64, heads, channels, dtype=torch.bfloat16) for channels in (576, 512))
    kv_layer = torch.zeros(1, 4, 64, 1, 576, dtype=torch.bfloat16)
    lens, table = torch.zeros(64, dtype=torch.int32), torch.zeros(64, 4, dtype=torch.int32)
    given = {"seq_lens": lens, "block_table": table, "plan": plan, "scale": 0.5, "out": out, "lse_HR": None}
    if kernels == "gathered":
        slots = torch.zeros(64, 64, dtype=torch.int32)
        gathered.launch(
            q_THC, kv_layer, counts=lens, slots=slots, plan=plan, scale=0.5, out=out, lse_HR=None
        )
        return
    if kernels == "hopper":
        hopper.launch(q_THC, kv_layer, tiles=tiles, **given)
    else:
        portable.launch(q_THC, kv_layer, kv_scale=None, tiles=tiles, **given)
    merge_splits(lens, plan, out, None, tiles)

def additions(kernel):
    Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
    code = subprocess.run([DISASSEMBLER, "-c", "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"\\b(FFMA|FADD|HGMMA)\\b", code))

for kernels in ("hopper", "portable"):
    for heads in (16, 128):
        compiled.clear()
        launch(kernels, heads, None)
        launch(kernels, heads, torch.zeros(64, 3, dtype=torch.int32))
        attend, merge, attend_tiles, merge_tiles = compiled
        assert all(kernel.metadata.shared <= SHARED_MAX for kernel in compiled), (kernels, heads)
        assert additions(attend)["HGMMA"] > 0
        # 16 heads of a decode are a product's columns on Hopper, and a query tile's are its rows.
        if (kernels, heads) != ("hopper", 16):
            assert additions(attend) == additions(attend_tiles), (kernels, heads)
        # Fewer decodes are merged in smaller blocks, which change no bit (`tests/gpu/test_batch_invariant.py`).
        assert additions(merge) == additions(merge_tiles), (kernels, heads)

for heads in (16, 128):
    compiled.clear()
    launch("gathered", heads, None)
    (attend,) = compiled
    assert attend.metadata.shared <= SHARED_MAX and additions(attend)["HGMMA"] > 0, heads
"""


def test_decodes_and_prompts_compile_to_the_same_additions_and_fit_the_shared_memory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
