"""The Hopper kernel of prompts in order compiles for an H200 at the sizes and features that it takes, and fits its
shared memory; other sizes are left to the portable kernel."""

import os
import subprocess
import sys

# Of the compiler's own kind, which the interpreter replaces when a kernel is imported: hence another process.
_SCRIPT = """
import torch
from tests import compile_only
from triton.runtime.jit import JITFunction
from attention.kernels.decode.plan import in_order_tiling, new_decode_plan, new_partials
from attention.kernels.in_order import hopper
from attention.kernels.in_order.prompts import tile_tokens_of

compile_only.pytest_configure()
compile_kernel, compiled = JITFunction.run, []

def compile_and_keep(kernel, *arguments, **options):
    compiled.append(compile_kernel(kernel, *arguments, **options))

JITFunction.run = compile_and_keep

def launch(heads, kv_heads, head_size, block_size, window=None, sinks=False):
    partials = new_partials(max_num_reqs=1, num_workers=1, num_heads=heads, head_size=head_size,
                            device=torch.device("cpu"))
    plan = new_decode_plan(
        tiling=in_order_tiling(head_size, torch.bfloat16, hopper=True), max_num_reqs=1, num_workers=1,
        partials=partials, sliding_window=window, split_keys=512, max_splits=32,
        tile_tokens=tile_tokens_of(heads // kv_heads),
    )
    q_THD = torch.zeros(200, heads, head_size, dtype=torch.bfloat16)
    kv_layer = torch.zeros(2, 300, block_size, kv_heads, head_size, dtype=torch.bfloat16)
    return hopper.launch(
        q_THD, kv_layer, query_start_loc=torch.tensor([0, 200], dtype=torch.int32),
        seq_lens=torch.tensor([200], dtype=torch.int32), block_table=torch.zeros(1, 30, dtype=torch.int32), plan=plan,
        scale=0.5, sinks_H=torch.zeros(heads) if sinks else None, out=torch.zeros_like(q_THD),
    )

assert launch(32, 8, 128, 16) and launch(64, 8, 64, 64, window=300, sinks=True)
assert len(compiled) == 2
assert all(kernel.metadata.shared <= 227 * 1024 and "wgmma" in kernel.asm["ptx"] for kernel in compiled)
assert not launch(16, 2, 256, 16) and not launch(32, 8, 128, 48) and not launch(256, 1, 128, 16)
assert len(compiled) == 2
"""


def test_the_kernel_compiles_and_fits() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
