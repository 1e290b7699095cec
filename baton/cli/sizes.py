"""Writes amounts of bytes and seconds for a person. Pure."""

_MIB = 1 << 20


def mib(num_bytes: int) -> str:
    """The amount in MiB with three digits, such as "0.2 MiB" or "1,340 MiB"."""
    found = num_bytes / _MIB
    return f"{found:,.0f} MiB" if found >= 100 else f"{found:.3g} MiB"


def milliseconds(seconds: float) -> str:
    """The time in ms: with one decimal below 100 ms, whole above."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"
