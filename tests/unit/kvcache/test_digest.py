"""The digest equals the sum of its definition, and damage or reordering changes it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from baton.kvcache.wire.digest import (
    COLUMNS,
    LENGTH_WEIGHT,
    ROW_BYTES,
    column_weights,
    constant_term,
    digest,
    digest_on_device,
    row_weights,
)
from baton.kvcache.wire.kernels.digest import CONSTANTS, digest_payload
from tests.device import DEVICE

SIGN_BITS = b"\x00\x00\x00\x80"


def payload_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def by_definition(data: bytes) -> int:
    rows = [data[start : start + ROW_BYTES].ljust(ROW_BYTES, b"\0") for start in range(0, len(data), ROW_BYTES)]
    row, column = row_weights(len(rows)).tolist(), column_weights().tolist()
    words = [np.frombuffer(content, dtype="<u4").tolist() for content in rows]
    total = LENGTH_WEIGHT * len(data)
    for i, content in enumerate(words):
        total += row[i] * (sum(content) % 2**32)
    for j in range(COLUMNS):
        total += column[j] * (sum(content[j] for content in words) % 2**32)
    return total % 2**64


def random_payload(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@given(st.binary(max_size=100))
def test_short_payloads_have_the_digest_of_the_definition(data: bytes) -> None:
    assert digest(payload_of(data)) == by_definition(data)


@pytest.mark.parametrize("excess", [-5, -4, -1, 0, 1, 4, 7, 8])
def test_payloads_around_a_row_have_the_digest_of_the_definition(excess: int) -> None:
    payload = random_payload(ROW_BYTES + excess)
    assert digest(payload) == by_definition(payload.numpy().tobytes())


def test_the_digest_is_part_of_the_wire_format_and_does_not_change() -> None:
    assert digest(payload_of(b"")) == 0
    assert digest(payload_of(bytes(range(256)))) == 0x402C339178B2F9C0


def test_weights_are_the_outputs_of_splitmix64() -> None:
    """The first three for seed 0, as published with the generator's implementations."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert column_weights(3).tolist() == [2 * (number | 1) % 2**64 for number in published]


def test_a_payload_may_start_at_any_byte() -> None:
    payload = random_payload(3 * ROW_BYTES + 5)
    for start in (1, 3, 4):
        assert digest(payload[start:]) == digest(payload[start:].clone())


@given(st.integers(0, 8 * (2 * ROW_BYTES + 4) - 1))
def test_a_flipped_bit_always_shows(bit: int) -> None:
    payload = random_payload(2 * ROW_BYTES + 4)
    before = digest(payload)
    payload[bit // 8] ^= 1 << (bit % 8)
    assert digest(payload) != before


@given(st.binary(min_size=8, max_size=64), st.data())
def test_swapped_words_of_any_width_show(data: bytes, draw: st.DataObject) -> None:
    width = draw.draw(st.sampled_from([1, 2, 4]))
    places = len(data) // width
    i, j = draw.draw(st.integers(0, places - 1)), draw.draw(st.integers(0, places - 1))
    cut = [data[place * width : (place + 1) * width] for place in range(places)]
    assume(cut[i] != cut[j])
    cut[i], cut[j] = cut[j], cut[i]
    swapped = b"".join(cut) + data[places * width :]
    assert digest(payload_of(swapped)) != digest(payload_of(data))


@given(st.integers(0, 3 * COLUMNS - 1), st.integers(0, 3 * COLUMNS - 1))
def test_a_sign_moved_to_any_other_word_shows(i: int, j: int) -> None:
    """The weakest error: one bit, the top one of its word, moves to another word."""
    assume(i != j)
    zeros = bytes(4 * 3 * COLUMNS)
    payloads = (payload_of(zeros[: 4 * place] + SIGN_BITS + zeros[4 * place + 4 :]) for place in (i, j))
    assert len({digest(payload) for payload in payloads}) == 2


def test_no_two_weights_are_equal_in_the_bits_that_matter() -> None:
    rows, columns = row_weights(1 << 14), column_weights()
    assert (rows % 2 == 1).all()
    assert (columns % 4 == 2).all()
    assert len(np.unique(rows % 2**33)) == len(rows)
    assert len(np.unique(columns % 2**33)) == len(columns)


@pytest.mark.parametrize(
    "damage",
    [
        lambda payload: payload.view(-1, 64).flip(0).flatten(),
        lambda payload: payload.roll(64),
        lambda payload: payload.roll(ROW_BYTES),
        lambda payload: payload.roll(1),
        lambda payload: torch.cat((payload[:-64], torch.zeros(64, dtype=torch.uint8))),
        lambda payload: torch.cat((payload[:64], payload[:64], payload[128:])),
        lambda payload: payload[:-1],
        lambda payload: torch.cat((payload, torch.zeros(1, dtype=torch.uint8))),
        lambda payload: torch.cat((payload, torch.zeros(ROW_BYTES, dtype=torch.uint8))),
        lambda payload: torch.zeros_like(payload),
    ],
    ids=[
        "rows reversed",
        "rows rotated",
        "whole rows rotated",
        "bytes rotated",
        "tail zeroed",
        "row repeated",
        "a byte short",
        "a zero byte more",
        "zero row more",
        "all zero",
    ],
)
def test_rows_and_tails_out_of_place_show(damage: Callable[[Tensor], Tensor]) -> None:
    payload = random_payload(2 * ROW_BYTES)
    assert digest(damage(payload)) != digest(payload)


def test_payloads_of_zeros_differ_by_their_length() -> None:
    digests = {digest(torch.zeros(size, dtype=torch.uint8)) for size in range(100)}
    assert len(digests) == 100


def test_every_swap_of_two_rows_shows() -> None:
    payload = random_payload(16 * 64)
    rows = payload.view(16, 64)
    digests = {digest(payload)}
    for i in range(16):
        for j in range(i):
            order = torch.arange(16)
            order[i], order[j] = j, i
            digests.add(digest(rows[order].flatten()))
    assert len(digests) == 1 + 16 * 15 // 2


@pytest.mark.parametrize(
    ("start", "size"),
    [
        (0, 0),
        (0, 3),
        (0, 100),
        (0, 2 * ROW_BYTES + 4),
        (4, 9 * ROW_BYTES - 2048),
        (1, ROW_BYTES + 1),
    ],
)
def test_a_gpus_digest_is_the_same_number(start: int, size: int) -> None:
    payload = random_payload(start + size)[start:]
    # A copy that starts at the same byte of its memory.
    on_device = torch.empty(start + size, dtype=torch.uint8, device=DEVICE)[start:].copy_(payload)
    out = torch.full((), -1, dtype=torch.int64, device=DEVICE)
    digest_payload(on_device, columns=COLUMNS, constant_term=constant_term(size), out=out)
    assert int(out) % 2**64 == digest(payload)
    assert int(digest_on_device(on_device)) == int(out)


@pytest.mark.parametrize("held_rows", [256, 16])
def test_many_programs_leave_the_same_number(held_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of programs at least, several tiles of each, and more rows than a program holds at a time."""
    monkeypatch.setitem(CONSTANTS, "HELD_ROWS", held_rows)
    payload = random_payload(400 * ROW_BYTES + 20)
    out = torch.full((), -1, dtype=torch.int64, device=DEVICE)
    digest_payload(payload.to(DEVICE), columns=COLUMNS, constant_term=constant_term(payload.numel()), out=out)
    assert int(out) % 2**64 == digest(payload)


@pytest.mark.parametrize("add", [0, 5, 2**64 - 1])
def test_a_number_is_added_and_the_sum_may_go_anywhere(add: int) -> None:
    payload = random_payload(ROW_BYTES + 8)
    expected = bytes([0xA5] * 5) + ((digest(payload) + add) % 2**64).to_bytes(8, "little") + bytes([0xA5] * 11)
    memory = torch.full((24,), 0xA5, dtype=torch.uint8)
    digest_on_device(payload, out=memory[5:13], add=add)
    assert memory.numpy().tobytes() == expected
    memory = torch.full((24,), 0xA5, dtype=torch.uint8, device=DEVICE)
    term = constant_term(payload.numel(), add)
    digest_payload(payload.to(DEVICE), columns=COLUMNS, constant_term=term, out=memory[5:13])
    assert memory.cpu().numpy().tobytes() == expected
