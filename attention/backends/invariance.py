"""Rules for all backends when a request's result must have the same bits alone and in any batch.

Decodes split their keys at fixed places, counted from a request's first key. Prompts sum in the order of decodes
(`rows_in_order`), so that a token has the same bits in any chunk, and a decoded token that is computed again with a
prompt (preemption, another node, an answer that begins the next prompt) keeps its bits. Attention that is not causal
runs one kernel with one tile size, over the cache alone.
"""

# Keys of a decode that make one partial result. On an H200 8 programs read 512 keys of 8 heads in 5 us; smaller splits
# cost memory and merging, larger ones leave most of the GPU idle when requests are few.
SPLIT_KEYS = 512
# Largest number of splits of one request, which bounds the memory for partial results: longer requests have longer
# splits.
MAX_SPLITS = 32
# Prefill kernels choose their tiles for this many queries of a request, regardless of the actual number.
ANY_QUERY_LEN = 2**15


def split_tokens_of(num_heads: int) -> int:
    """Number of latent tokens per partial result of a decode; larger where many heads make partial results large."""
    return 512 if num_heads <= 32 else 4096
