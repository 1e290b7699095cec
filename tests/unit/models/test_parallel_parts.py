"""Which rank has which part of a model, and which splits are refused: arithmetic on configs, without ranks or weights.
`test_parallel` shows that the parts compute the model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel, channels, kv_heads, padded_rows, query_heads, vocabulary_rows
from baton.models.loading.local_config import local_config
from baton.models.loading.shares import Shares
from tests.unit.models.phi3_small_checkpoint import PUBLISHED as PHI3_SMALL
from tests.unit.models.phi3_small_checkpoint import write_config
from tests.unit.models.split import ranks
from tests.unit.models.test_config import LLAMA
from tests.unit.models.test_published_configs import BLOOM, FALCON_40B, FALCON_RW
from tests.unit.models.test_quantization import DEEPSEEK

# Its config.json names neither the heads nor the sizes that it has; they are the defaults.
FALCON_7B: dict[str, Any] = {"architectures": ["FalconForCausalLM"], "torch_dtype": "bfloat16", "alibi": False}
IN_BLOCKS = LLAMA | {"head_dim": 128, "intermediate_size": 272, "quantization_config": DEEPSEEK}


def read(directory: Path, values: Mapping[str, Any]) -> ModelConfig:
    return read_config(write_config(directory, values))


def attention_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab_size", [61, 128, 100_000, 7])
def test_every_token_is_one_rank_s(vocab_size: int, size: int) -> None:
    held = [vocabulary_rows(vocab_size, parallel) for parallel in ranks(size)]
    assert [row for rows in held for row in rows] == list(range(vocab_size))
    assert all(len(rows) <= padded_rows(vocab_size, parallel) for rows, parallel in zip(held, ranks(size), strict=True))


@pytest.mark.parametrize(
    ("num_kv_heads", "expected"),
    [(8, [[0, 1], [2, 3], [4, 5], [6, 7]]), (4, [[0], [1], [2], [3]]), (2, [[0], [0], [1], [1]]), (1, [[0]] * 4)],
)
def test_kv_heads_go_where_their_queries_are(num_kv_heads: int, expected: list[list[int]]) -> None:
    held = [list(kv_heads(num_kv_heads, parallel)) for parallel in ranks(4)]
    assert held == expected
    queries_per_kv_head = 16 // num_kv_heads
    for parallel, heads in zip(ranks(4), held, strict=True):
        assert sorted({head // queries_per_kv_head for head in query_heads(16, parallel)}) == heads


@pytest.mark.parametrize(
    ("size", "block", "expected"),
    [(48, None, [12] * 4), (640, 128, [128, 128, 128, 256]), (1400, 128, [256, 384, 384, 376])],
)
def test_channels_are_cut_in_equal_parts_or_between_blocks(size: int, block: int | None, expected: list[int]) -> None:
    held = [channels(size, parallel, block=block) for parallel in ranks(4)]
    assert [len(part) for part in held] == expected
    assert [channel for part in held for channel in part] == list(range(size))


@pytest.mark.parametrize(
    ("values", "size", "message", "allowed"),
    [
        (LLAMA, 3, "it has 4 query heads", ("1", "2", "4")),
        (LLAMA, 8, "it has 4 query heads", ("1", "2", "4")),
        (IN_BLOCKS, 4, "its MLP has 272 channels in blocks of 128", ("1", "2")),
        (BLOOM, 3, "it has 16 query heads", ("1", "2", "4", "8", "16")),
        (FALCON_40B, 5, "it has 128 query heads", ("1", "2", "4", "8", "16", "32", "64")),
        (FALCON_7B, 3, "its MLP has 18176 channels", ("1", "2", "4", "8", "16", "32", "64")),
        (FALCON_7B, 128, "it has 71 query heads", ("1", "2", "4", "8", "16", "32", "64")),
        (PHI3_SMALL, 6, "it has 32 query heads", ("1", "2", "4", "8", "16", "32")),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused_with_those_that_can(
    values: Mapping[str, Any], size: int, message: str, allowed: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        local_config(read(tmp_path, values), TensorParallel(0, size))
    assert (refused.value.field, refused.value.allowed) == ("tensor_parallel_size", allowed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda gqa: replace(gqa, num_heads=12, num_kv_heads=6), "it has 6 kv heads"),
        (lambda gqa: replace(gqa, num_heads=8, num_kv_heads=4, head_dim=40), "channels of queries are not a multiple"),
        (lambda gqa: replace(gqa, num_heads=6, num_kv_heads=1), "it has 6 query heads"),
    ],
)
def test_heads_that_do_not_come_out_even_are_refused(
    change: Callable[[GQAConfig], GQAConfig], message: str, tmp_path: Path
) -> None:
    config = read(tmp_path, IN_BLOCKS)
    config = replace(config, attention=change(attention_of(config)), intermediate_size=1024)
    with pytest.raises(ConfigError, match=message):
        local_config(config, TensorParallel(0, 4))


def test_unequal_heads_are_refused_where_a_pattern_counts_equal_ones(tmp_path: Path) -> None:
    values = PHI3_SMALL | {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 192}
    with pytest.raises(ConfigError, match="it has 6 query heads"):
        local_config(read(tmp_path, values), TensorParallel(0, 4))


def test_query_heads_of_one_kv_head_need_not_come_out_even(tmp_path: Path) -> None:
    """Falcon-7B has 71."""
    config = read(tmp_path, FALCON_7B)
    local = [attention_of(local_config(config, parallel)) for parallel in ranks(4)]
    assert [(gqa.num_heads, gqa.num_kv_heads) for gqa in local] == [(17, 1), (18, 1), (18, 1), (18, 1)]


@pytest.mark.parametrize("values", [BLOOM, FALCON_RW, FALCON_RW | {"multi_query": True, "num_attention_heads": 16}])
@pytest.mark.parametrize("size", [2, 8])
def test_each_rank_has_the_slopes_of_its_heads(values: Mapping[str, Any], size: int, tmp_path: Path) -> None:
    config = read(tmp_path, values)
    local = [attention_of(local_config(config, parallel)) for parallel in ranks(size)]
    assert all(len(gqa.alibi_slopes) == gqa.num_heads for gqa in local)
    assert sum((gqa.alibi_slopes for gqa in local), ()) == attention_of(config).alibi_slopes


@pytest.mark.parametrize("values", [PHI3_SMALL, PHI3_SMALL | {"blocksparse_homo_head_pattern": True}])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_each_rank_has_the_stripes_of_its_heads(values: Mapping[str, Any], size: int, tmp_path: Path) -> None:
    config = read(tmp_path, values)
    whole = attention_of(config).blocksparse[0]
    assert whole is not None
    offsets: list[int] = []
    for parallel in ranks(size):
        gqa = attention_of(local_config(config, parallel))
        pattern, *others = gqa.blocksparse
        assert pattern is not None
        assert (pattern.num_heads, pattern.num_kv_heads) == (gqa.num_heads, gqa.num_kv_heads)
        assert others == [None, pattern] * 15 + [None], "which layers are dense is as it was"
        offsets.extend(pattern.head_offsets)
    assert tuple(offsets) == whole.head_offsets


def rows_of_one_tensor(values: Mapping[str, Any], name: str, size: int, directory: Path) -> list[list[range]]:
    """Of queries, keys and values, by rank, in heads."""
    config = read(directory, values)
    head_dim = attention_of(config).head_dim
    shares = [Shares(config, parallel).of(name) for parallel in ranks(size)]
    return [
        [range(part.start // head_dim, part.stop // head_dim) for part in share.ranges] for share in shares if share
    ]


def test_a_rank_s_rows_of_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    """In Falcon-40B each kv head has 16 query heads, then its keys, then its values."""
    name = "transformer.h.3.self_attention.query_key_value.weight"
    in_four = rows_of_one_tensor(FALCON_40B, name, 4, tmp_path)
    assert in_four == [[range(36 * rank, 36 * (rank + 1))] for rank in range(4)], "two kv heads with all of theirs"
    in_sixteen = rows_of_one_tensor(FALCON_40B, name, 16, tmp_path)
    assert in_sixteen[:3] == [
        [range(8), range(16, 18)],
        [range(8, 16), range(16, 18)],
        [range(18, 26), range(34, 36)],
    ], "a kv head whole, and half of its queries"
    in_two = rows_of_one_tensor(FALCON_7B, name, 2, tmp_path)
    assert in_two == [[range(35), range(71, 73)], [range(35, 71), range(71, 73)]]


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2 of 2"):
        TensorParallel(2, 2)


def test_fused_layers_in_blocks_are_cut_at_blocks_or_refused(tmp_path: Path) -> None:
    """Phi-3 has gate and up in one tensor, in which up's rows begin where gate's end."""
    phi3 = IN_BLOCKS | {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
    scales = "model.layers.0.mlp.gate_up_proj.weight_scale_inv"
    whole = Shares(read(tmp_path, phi3 | {"intermediate_size": 512}), TensorParallel(1, 2)).of(scales)
    assert whole is not None
    assert whole.ranges == (range(2, 4), range(6, 8))
    with pytest.raises(ConfigError, match="parts of two ranks") as refused:
        Shares(read(tmp_path, phi3), TensorParallel(1, 2)).of(scales)
    assert refused.value.field == "tensor_parallel_size"
