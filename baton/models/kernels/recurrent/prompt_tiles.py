"""Finds the prompt of each tile of a step's tokens, so that a grid needs one program for each tile. A captured step has
room for many prompts, and any of them may have all tokens: a grid of prompts by tiles would mostly start programs
without work."""

import triton
import triton.language as tl

from baton.models.kernels.recurrent.state_rows import StateRows


def most_tiles(rows: StateRows, num_tokens: int, tile: int) -> int:
    """An upper bound of the number of tiles of all prompts: each may have two that are not full."""
    return num_tokens // tile + 2 * len(rows.prompt_slots_P)


@triton.jit
def find_tile(index, starts_ptr, context_ptr, num_prompts, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Returns the prompt of a tile and the tile's place in it; no prompt: `num_prompts`.

    Args:
        starts_ptr, context_ptr: `StateRows.prompt_starts_P1` and `prompt_context_P`.
        num_prompts: never specialised, so that no step waits for a compiler.
        ALIGN: TILE for tiles that end at multiples of TILE of the prompt's positions, 1 for tiles that begin at its
            first new token.
    """
    BLOCK: tl.constexpr = 128
    prompt, tiles_before, tiles, base = num_prompts * 0, num_prompts * 0, num_prompts * 0, num_prompts * 0
    while base < num_prompts:
        p_P = base + tl.arange(0, BLOCK)
        has_P = p_P < num_prompts
        start_P = tl.load(starts_ptr + p_P, mask=has_P, other=0)
        length_P = tl.load(starts_ptr + p_P + 1, mask=has_P, other=0) - start_P
        cut_P = tl.load(context_ptr + p_P, mask=has_P, other=0) % ALIGN
        tiles_P = tl.where(length_P > 0, (cut_P + length_P + TILE - 1) // TILE, 0)
        is_before_P = has_P & (tiles + tl.cumsum(tiles_P, axis=0) <= index)
        prompt += tl.sum(is_before_P.to(tl.int32), axis=0)
        tiles_before += tl.sum(tl.where(is_before_P, tiles_P, 0), axis=0)
        tiles += tl.sum(tiles_P, axis=0)
        base += BLOCK
    return prompt, index - tiles_before


@triton.jit
def find_sub_chunk(slots_ptr, starts_ptr, context_ptr, num_prompts, CHUNK: tl.constexpr):
    """Returns first token and number of tokens of this program's sub-chunk; 0 tokens if there is none."""
    prompt, place = find_tile(tl.program_id(0), starts_ptr, context_ptr, num_prompts, TILE=CHUNK, ALIGN=CHUNK)
    is_one = prompt < num_prompts
    start = tl.load(starts_ptr + prompt)
    stop = tl.load(starts_ptr + prompt + 1, mask=is_one, other=0)
    aligned = start - tl.load(context_ptr + prompt, mask=is_one, other=0) % CHUNK + place * CHUNK
    first = tl.maximum(aligned, start)
    count = tl.minimum(aligned + CHUNK, stop) - first
    return first, tl.where(tl.load(slots_ptr + prompt, mask=is_one, other=-1) >= 0, count, 0)
