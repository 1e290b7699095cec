"""A new batch compiles no kernel again: compiling takes seconds, in which no request gets a token."""

import os
import subprocess
import sys

# Of the compiler's own kind, which the interpreter replaces when a kernel is imported: hence another process.
_SCRIPT = """
from dataclasses import replace
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from attention.kernels.blocksparse import decode as blocksparse_decode, hopper as blocksparse_hopper
from attention.kernels.blocksparse import prefill as blocksparse
from attention.kernels.decode import attend as decode
from attention.kernels.in_order import decodes as in_order_decodes, hopper as in_order_hopper
from attention.kernels.in_order import prompts as in_order_prompts
from attention.kernels.mla import gathered, hopper as mla_decode_hopper, portable as mla_decode_plain
from attention.kernels.mla.merge import merge_splits
from attention.kernels.mla.plan import make_mla_decode_plan
from attention.kernels.paged import hopper, persistent, portable
from attention.kernels.paged.call import AttentionCall, KernelFeatures, Keys
from attention.kernels.paged.work_list import WorkList, list_work
from baton.kvcache.kernels import gather
from baton.kvcache.wire.kernels import conversion as wire_conversion, digest, gather_scatter as wire

def launch_list(call):
    keys = call.keys
    list_work(call.query_start_loc, keys.seq_lens, num_tokens=call.q_THD.shape[0], tokens=64, num_programs=132)

def launch_persistent(call):
    rows, count = torch.zeros(call.q_THD.shape[0] + 1, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    assert persistent.launch(call, WorkList(64, rows, count, call.query_start_loc, num_programs=132))

def launch_split(call):
    portable.launch(replace(call, splits=2 + call.num_reqs))

paged_launches = [portable.launch, launch_split, launch_list, hopper.launch, launch_persistent]
kernels = [decode._decode_kernel, mla_decode_plain._decode, gather._gather_kernel]
kernels += [in_order_decodes._decode_kernel, in_order_prompts._prompt_kernel, in_order_hopper._attend_tile]
kernels += [blocksparse._prefill_kernel, blocksparse_decode._decode_kernel]
kernels += [mla_decode_hopper._decode, gathered._decode_gathered, blocksparse_hopper._attend_kernel]
backend = make_backend(GPUTarget("cuda", 90, 32))
memory = torch.zeros(64, dtype=torch.int32)
after_decodes = {"query_start_ptr", "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "table_ptr"}

def compiled_for(kernel, moved, width):
    # A decode's lengths are the batch's first.
    moving = after_decodes - ({"seq_lens_ptr"} if kernel is decode._decode_kernel else set())
    if kernel in (blocksparse_decode._decode_kernel, in_order_decodes._decode_kernel):
        moving = set()
    values = {}
    for param in kernel.params:
        if param.name in after_decodes:
            values[param.name] = memory[moved:] if param.name in moving else memory
        elif param.name in ("stride_table_r", "table_stride_R", "table_stride", "slots_stride_R"):
            values[param.name] = width
        else:
            values[param.name] = 0
    return create_function_from_signature(kernel.signature, kernel.params, backend)(*values.values())[1]

for kernel in kernels:
    assert len({str(compiled_for(kernel, moved, width)) for moved, width in ((0, 1), (1, 13), (4, 32))}) == 1, kernel

def paged_call(num_reqs, moved, width, num_tokens):
    # The kernels take groups of values, so these are the ones of real launches, up to the compiler.
    layer = torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)
    numbers = torch.zeros(moved + num_reqs + 1, dtype=torch.int32)[moved:]
    tables = torch.zeros(num_reqs, width, dtype=torch.int32)
    keys = Keys(layer[0], layer[1], None, numbers[:-1], tables, expected_len=64)
    queries = torch.zeros(num_tokens, 4, 64, dtype=torch.bfloat16)
    sums = torch.zeros(4, num_tokens)
    features = KernelFeatures(sinks_H=sums[:, 0])
    return AttentionCall(queries, keys, numbers, 128, 0.5, features, torch.zeros_like(queries), sums)

def record(kernel, *arguments, grid, warmup, **options):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, values, others = bind(*arguments, **options)
    signatures.setdefault(kernel.__name__, set()).add(str((values, others)))

JITFunction.run = record
for launch in paged_launches:
    signatures = {}
    for num_reqs, moved, width, num_tokens in ((1, 0, 1, 16), (2, 1, 13, 37), (16, 4, 32, 256)):
        launch(paged_call(num_reqs, moved, width, num_tokens))
    assert {len(found) for found in signatures.values()} == {1}, signatures

def latent_prompt(num_tiles, width):
    # Query tiles have tensors of their own, so these lie where the launches' do.
    plan = make_mla_decode_plan(
        num_heads=16, latent_channels=512, max_num_reqs=4, max_model_len=4096, num_sms=132, device="cpu",
        split_tokens=1024,
    )
    q_THC, kv_layer = torch.zeros(8, 16, 576, dtype=torch.bfloat16), torch.zeros(1, 8, 64, 1, 576, dtype=torch.bfloat16)
    out, lens = torch.zeros(8, 16, 512, dtype=torch.bfloat16), torch.zeros(num_tiles, dtype=torch.int32)
    tables, tiles = torch.zeros(3, width, dtype=torch.int32), torch.zeros(num_tiles, 3, dtype=torch.int32)
    given = {"seq_lens": lens, "block_table": tables, "plan": plan, "scale": 0.5, "out": out, "lse_HR": None}
    mla_decode_plain.launch(q_THC, kv_layer, kv_scale=None, tiles=tiles, **given)
    mla_decode_hopper.launch(q_THC, kv_layer, tiles=tiles, **given)
    merge_splits(lens, plan, out, None, tiles)

signatures = {}
for num_tiles, width in ((1, 1), (3, 13), (129, 16), (512, 32)):
    latent_prompt(num_tiles, width)
assert {name: len(found) for name, found in signatures.items()} == {"_decode": 2, "_merge_splits": 1}, signatures

def compiled_for_payload(kernel, number):
    values = {param.name: number if param.annotation in ("i32", "i64") else memory for param in kernel.params}
    values |= {"block_ids_ptr": memory[number % 16 :], "digest_ptr": memory[number % 16 :]}
    given = [values[param.name] for param in kernel.params]
    return create_function_from_signature(kernel.signature, kernel.params, backend)(*given)[1]

kernels = [wire._move_kernel, wire._gather_and_digest_kernel, digest._digest_kernel]
kernels += [wire_conversion._gather_converted_kernel]
for kernel in kernels:
    assert len({str(compiled_for_payload(kernel, number)) for number in (0, 1, 16, 2**40 + 3)}) == 1, kernel
"""


def test_tables_of_any_width_requests_after_any_number_of_decodes_and_payloads_of_any_size_run_the_same_kernels() -> (
    None
):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
