"""The message size for a job, and the cost of a message."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.link import LEAST_PAYLOAD_BYTES, LinkSpeed, choose_payload_bytes, message_cost_s

MIB = 1 << 20
seconds = st.floats(1e-7, 1e-2)
rates = st.floats(1e7, 1e12)
links = st.builds(LinkSpeed, latency_s=seconds, message_cost_s=st.one_of(st.just(0.0), seconds), bytes_per_s=rates)
sizes = st.integers(0, 1 << 40)
limits = st.integers(1, 1 << 30)


def job_s(link: LinkSpeed, job_bytes: int, payload_bytes: int) -> float:
    """The module's formula."""
    messages = job_bytes / payload_bytes
    return messages * link.message_cost_s + (job_bytes + 2 * payload_bytes) / link.bytes_per_s


@given(links, sizes, limits)
def test_never_above_the_limit_nor_below_the_least(link: LinkSpeed, job_bytes: int, limit: int) -> None:
    chosen = choose_payload_bytes(link, job_bytes=job_bytes, limit=limit)
    assert min(LEAST_PAYLOAD_BYTES, limit) <= chosen <= limit


@given(links, sizes, sizes, limits)
def test_a_larger_job_never_has_smaller_messages(link: LinkSpeed, one: int, other: int, limit: int) -> None:
    small, large = sorted((one, other))
    assert choose_payload_bytes(link, job_bytes=small, limit=limit) <= choose_payload_bytes(
        link, job_bytes=large, limit=limit
    )


@settings(deadline=None)
@given(links, st.integers(1, 1 << 36), st.integers(1, 1 << 30))
def test_no_other_size_is_quicker(link: LinkSpeed, job_bytes: int, limit: int) -> None:
    chosen = choose_payload_bytes(link, job_bytes=job_bytes, limit=limit)
    least = min(LEAST_PAYLOAD_BYTES, limit)
    others = {min(limit, max(least, int(least * 1.1**step))) for step in range(120)}
    quickest = min(job_s(link, job_bytes, other) for other in others)
    assert job_s(link, job_bytes, chosen) <= quickest * 1.0001


def test_links_of_known_kinds_get_sizes_of_known_order() -> None:
    shared_memory = LinkSpeed(1e-5, message_cost_s=6e-5, bytes_per_s=3e9)
    assert MIB // 2 < choose_payload_bytes(shared_memory, job_bytes=16 * MIB, limit=4 * MIB) < 2 * MIB
    between_gpus = LinkSpeed(1e-5, message_cost_s=5e-5, bytes_per_s=3.5e11)
    assert choose_payload_bytes(between_gpus, job_bytes=1024 * MIB, limit=64 * MIB) == 64 * MIB
    assert 16 * MIB < choose_payload_bytes(between_gpus, job_bytes=128 * MIB, limit=64 * MIB) < 64 * MIB


def test_the_cost_is_found_where_there_is_no_noise() -> None:
    cost_s, rate = 4e-5, 2e9
    assert message_cost_s(
        small_bytes=65536, small_s=cost_s + 65536 / rate, large_bytes=4 * MIB, large_s=cost_s + 4 * MIB / rate
    ) == pytest.approx(cost_s)


@pytest.mark.parametrize("large_s", [1e-9, 1.0])
def test_noise_leaves_it_between_half_of_a_small_message_and_all_of_it(large_s: float) -> None:
    cost_s = message_cost_s(small_bytes=65536, small_s=1e-4, large_bytes=4 * MIB, large_s=large_s)
    assert 5e-5 <= cost_s <= 1e-4
