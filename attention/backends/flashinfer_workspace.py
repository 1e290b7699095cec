"""The memory that flashinfer's planners need for a node's largest batch, and the reasons why a node's batches cannot
fit.

The planners allocate these sizes (`include/flashinfer/attention/scheduler.cuh`, 0.6). A planner without enough memory
raises while serving, so backends allocate these sizes once and refuse too large ones at selection. Pure functions;
imports no flashinfer. Legend: R requests, T tokens.
"""

from attention.backend import AttentionNeeds
from attention.platform import Platform

# flashinfer recommends the first for partial results; its wrappers allocate the second themselves for a plan's lists.
WORKSPACE_BYTES = 128 << 20
INT_WORKSPACE_BYTES = 8 << 20
# Above this the workspace takes memory that the cache needs: 128 query heads on one kv head take 2.1 GiB.
MAX_WORKSPACE_BYTES = 4 << 30

_FLOAT_BYTES = _INT_BYTES = 4
_CTAS_PER_SM = 2
_TILE_ROWS = 128
_TILE_ROWS_OF_LARGE_HEADS = 64  # from 256 channels on
_SMALL_TILE_ROWS = 16
# Up to this number of tiles its Hopper kernels list each head's tiles separately, in seven lists.
_HOPPER_TILE_ROWS = 128
_TILES_PER_HEAD_APART = 4096
_HOPPER_LISTS = 7
_ALIGNMENT_SLACK = 4096

_MLA_TILE_ROWS = 64
_MLA_LATENT_BYTES = 2 * 512  # of one partial result in 16 bits
# Its MLA planner writes lists of this length without a check.
_MLA_WORK_ITEMS = 16384


def float_workspace_bytes(needs: AttentionNeeds, num_sms: int) -> int:
    """Bytes for partial outputs and their log-sum-exps in float32, for any batch of a node.

    A plan with split keys has at most as many tiles as run at once for batches that are planned anew. For captured
    decodes, whose plan must fit every later batch, it has one tile per request more than the rows fill.
    """
    group = needs.num_heads // needs.num_kv_heads
    tiles_at_once = _CTAS_PER_SM * num_sms // needs.num_kv_heads
    largest_tile = _TILE_ROWS if needs.head_size < 256 else _TILE_ROWS_OF_LARGE_HEADS
    tile = _decode_tile_rows(group, largest_tile)
    decode_tiles = -(-needs.max_num_reqs * group // tile) + needs.max_num_reqs - 1
    rows = max(tiles_at_once * largest_tile, max(tiles_at_once, decode_tiles) * tile)
    return needs.num_heads * rows * (needs.head_size + 1) * _FLOAT_BYTES + _ALIGNMENT_SLACK


def int_workspace_bytes(needs: AttentionNeeds, num_sms: int) -> int:
    """Bytes for the lists of one plan, for any batch of a node."""
    group = needs.num_heads // needs.num_kv_heads
    tiles_at_once = _CTAS_PER_SM * num_sms // needs.num_kv_heads
    # Tiles have 16 or 64 rows only where requests fill few of them: at most two tiles per request.
    smallest_large_tile = _TILE_ROWS if needs.head_size < 256 else _TILE_ROWS_OF_LARGE_HEADS
    tiles = max(2 * needs.max_num_reqs, needs.max_num_tokens * group // smallest_large_tile + needs.max_num_reqs)
    tiles = max(tiles, tiles_at_once, -(-needs.max_num_reqs * group // _SMALL_TILE_ROWS) + needs.max_num_reqs)
    ampere = tiles * (3 * _INT_BYTES + 1) + (needs.max_num_reqs + needs.max_num_tokens + 4) * _INT_BYTES
    per_head = -(-needs.max_num_tokens // _HOPPER_TILE_ROWS) + needs.max_num_reqs
    items = max(per_head, min(per_head, _TILES_PER_HEAD_APART) * needs.num_heads)
    hopper = (items * _HOPPER_LISTS + num_sms + 1) * _INT_BYTES
    return max(ampere, hopper) + _ALIGNMENT_SLACK


def mla_workspace_bytes(num_sms: int) -> int:
    """Bytes for the partial latents of two tiles on each multiprocessor, for any batch."""
    return 2 * num_sms * _MLA_TILE_ROWS * (_MLA_LATENT_BYTES + _FLOAT_BYTES) + _ALIGNMENT_SLACK


def reasons_against_plans(needs: AttentionNeeds, platform: Platform) -> tuple[str, ...]:
    """Reasons why FLASHINFER could not plan some batch of this node; () if it can plan all."""
    wanted = float_workspace_bytes(needs, platform.num_sms) + int_workspace_bytes(needs, platform.num_sms)
    if wanted <= MAX_WORKSPACE_BYTES:
        return ()
    return (
        f"its plans need {wanted / 2**30:.1f} GiB of workspace for {needs.num_heads} query heads on "
        f"{needs.num_kv_heads} of {needs.head_size}, {needs.max_num_reqs} requests and {needs.max_num_tokens} tokens "
        f"in a batch, above {MAX_WORKSPACE_BYTES >> 30} GiB (fewer --max-batch-requests need less)",
    )


def reasons_against_mla_plans(needs: AttentionNeeds, platform: Platform) -> tuple[str, ...]:
    """Reasons why FLASHINFER_MLA could not plan some batch of this node; () if it can plan all."""
    # More than 64 heads are one tile of two multiprocessors; cutting keys adds at most one piece per multiprocessor.
    tile = _MLA_TILE_ROWS if needs.num_heads <= _MLA_TILE_ROWS else 2 * _MLA_TILE_ROWS
    items = needs.max_num_reqs * -(-needs.num_heads // tile) + platform.num_sms
    if items <= _MLA_WORK_ITEMS:
        return ()
    return (
        f"its plans hold {_MLA_WORK_ITEMS} pieces of work, and {needs.max_num_reqs} requests with {needs.num_heads} "
        f"heads may be {items} (fewer --max-batch-requests need less)",
    )


def _decode_tile_rows(group: int, largest_tile: int) -> int:
    """Rows of a tile of captured decodes, one query of `group` heads each."""
    if group > 64:
        return largest_tile
    return 64 if group > _SMALL_TILE_ROWS else _SMALL_TILE_ROWS
