"""Bounds of settings that no machine reaches: beyond them arithmetic overflows, or a loop or a table never ends."""

SECONDS_MAX, RATE_MAX = 1e9, 1e9
COUNT_MAX = 1 << 20
TOKENS_MAX = 2**31 - 1  # positions take 32 bits
