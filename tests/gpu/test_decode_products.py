"""The product for few rows on a GPU, at the shapes of served models: near float64, the same bits every time, captured
or not, after other kernels or alone; and layers get it when a model is loaded."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.engine.batch import BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import DecodeGraphs, GraphSettings
from baton.engine.request import int_array
from baton.models.kernels.matmul.decode_matmul import DecodeMultiply, choose, new_counters
from baton.models.layers.linear import Linear
from baton.models.layers.products import use_library_products
from baton.tritonlib import launch
from tests.conformance.attention.oracle import relative_error
from tests.gpu.demo import build_demo

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BLOCKS = 8
# Two layers as wide as Llama-3.1-8B's.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 65536,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Shapes for each kind of tile: Llama-8B's qkv, o, gate_up and down, Qwen3-8B's gate_up, DeepSeek-V2-Lite's kv_a, first
# down and head, and rows that no tile divides.
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (24576, 4096),
    (576, 2048),
    (2048, 10944),
    (102400, 2048),
    (4136, 4104),
]
# A tile is full, or not; beyond 32 only the head's is there.
TOKENS = [1, 3, 8, 9, 16, 17, 32, 33, 64]


def weight_of(rows: int, channels: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    weight = torch.randn(rows, channels, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    return weight.mul_(channels**-0.5)


def product_of(weight: Tensor) -> DecodeMultiply:
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return DecodeMultiply(new_counters(weight), num_sms)


@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_products_are_as_near_to_float64_as_the_librarys(rows: int, channels: int) -> None:
    weight = weight_of(rows, channels)
    product = product_of(weight)
    bias = torch.randn(rows, device=DEVICE, dtype=torch.bfloat16)
    for num_tokens in TOKENS:
        if choose(num_tokens, rows, channels, product.num_sms) is None:
            continue
        # Rows of a wider matrix, as after a fused projection.
        x = torch.randn(num_tokens, channels + 64, device=DEVICE, dtype=torch.bfloat16)[:, :channels]
        out = product(x, weight, bias)
        exact = torch.cat([linear(x.double(), part.double()) for part in weight.split(16384)], dim=1) + bias.double()
        error = (out.double() - exact).abs()
        allowed = exact.abs() * 2**-8 + 1e-3
        assert bool((error <= allowed).all()), (num_tokens, error.max().item())
        assert not product.arrived.any(), num_tokens


@pytest.mark.parametrize(("rows", "channels"), [(6144, 4096), (4096, 4096), (4096, 14336), (576, 2048)])
def test_the_same_call_has_the_same_bits(rows: int, channels: int) -> None:
    weight = weight_of(rows, channels)
    product = product_of(weight)
    for num_tokens in (1, 8, 16, 32):
        x = torch.randn(num_tokens, channels, device=DEVICE, dtype=torch.bfloat16)
        first = product(x, weight, None)
        for _ in range(100):
            assert torch.equal(product(x, weight, None), first), num_tokens


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32])
def test_a_captured_chain_of_products_gives_the_bits_of_one_by_one(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product reads the output of the one before it, while its own weights are being loaded."""
    shapes = [(6144, 4096), (4096, 6144), (28672, 4096), (4096, 28672)]
    weights = [weight_of(*shape, seed=index) for index, shape in enumerate(shapes)]
    products = [product_of(weight) for weight in weights]

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            for product, weight in zip(products, weights, strict=True):
                x = product(x, weight, None)
        return x

    x = torch.randn(num_tokens, 4096, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = chain(x)
    torch.cuda.synchronize()
    monkeypatch.setattr(launch, "_can_overlap", lambda device: False)
    for _ in range(20):
        x.normal_()
        expected = chain(x)
        graph.replay()
        assert torch.equal(out, expected)
    assert bool(out.isfinite().all())
    assert out.float().std() > 0.1
    for product in products:
        assert not product.arrived.any()


def test_a_model_is_loaded_with_it_and_its_captured_steps_give_the_librarys_logits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    built = build_demo(
        tmp_path,
        dtype="bfloat16",
        num_blocks=48 * BLOCKS,
        max_batch_requests=48,
        load_format="dummy",
        cuda_graphs=False,
    )
    model = built.runner.model
    given = [name for name, module in model.named_modules() if isinstance(module, Linear) and module.multiply != linear]
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert len(given) == (4 * LLAMA["num_hidden_layers"] + 1 if on_hopper else 0)
    dice = random.Random(0)
    tables = [int_array(list(range(row * BLOCKS, (row + 1) * BLOCKS))) for row in range(48)]
    with torch.inference_mode():
        built.cache.view.zero_()
        ours = captured(built)
        products = use_library_products(model)
        librarys = captured(built)
        slots = ours.new_slots()
        for step in range(60):
            size = dice.choice(ours.sizes)
            rows = [
                BatchRow("", int_array([dice.randrange(100)]), dice.randrange(BLOCKS * 16), tables[row], None)
                for row in range(size)
            ]
            logits_RV = ours.launch(rows, size, step=step, slot=slots.take()).clone()
            expected_RV = librarys.launch(rows, size, step=step, slot=slots.take())
            assert relative_error(logits_RV, expected_RV.double()) < 0.02, (step, size)
    assert not any(product.arrived.any() for product in products)


def test_a_batch_invariant_model_is_loaded_without_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    built = build_demo(tmp_path, dtype="bfloat16", load_format="dummy", cuda_graphs=False, batch_invariant=True)
    assert not any(
        isinstance(getattr(module, "multiply", None), DecodeMultiply) for module in built.runner.model.modules()
    )


def captured(built: BuiltRunner) -> DecodeGraphs:
    settings = GraphSettings(max_requests=48, max_context_tokens=BLOCKS * 16, largest=48)
    graphs = DecodeGraphs(built.runner.model, built.runner.backend, built.cache, settings)
    graphs.capture()
    return graphs
