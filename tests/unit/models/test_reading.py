"""Tensors that several threads read in pieces arrive whole, on any device; errors name files that cannot be read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.checkpoint import tensor_reader
from baton.models.checkpoint.checkpoint import StoredTensor, read_checkpoint
from baton.models.checkpoint.tensor_reader import read_into, read_tensor
from tests.device import DEVICE


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(37, 53).bfloat16(),
        "cube": torch.randn(3, 5, 7),
        "fp8": torch.randn(64, 16).to(torch.float8_e4m3fn),
        "scalar": torch.randn(()),
        "nothing": torch.empty(0, 4),
        "half": torch.randn(11).half(),
    }


@pytest.fixture
def stored(tensors: dict[str, Tensor], tmp_path: Path) -> dict[str, StoredTensor]:
    save_file(tensors, tmp_path / "model.safetensors")
    return dict(read_checkpoint(tmp_path))


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


@pytest.fixture(params=[64, 1000, 1 << 20], ids=["pieces", "some in pieces", "whole"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", request.param)


@pytest.mark.usefixtures("_pieces")
def test_every_number_arrives_in_its_place(tensors: dict[str, Tensor], stored: dict[str, StoredTensor]) -> None:
    targets = {name: torch.empty_like(tensor, device=DEVICE) for name, tensor in tensors.items()}
    read_into([(stored[name], target) for name, target in targets.items()])
    for name, target in targets.items():
        assert torch.equal(bits(target), bits(tensors[name])), name


@pytest.mark.usefixtures("_pieces")
def test_numbers_are_converted_and_may_lie_apart(tensors: dict[str, Tensor], stored: dict[str, StoredTensor]) -> None:
    wide, turned = torch.zeros(37, 2, 53, device=DEVICE), torch.zeros(7, 5, 3, device=DEVICE)
    half = torch.zeros(11, dtype=torch.bfloat16, device=DEVICE)
    read_into([(stored["matrix"], wide[:, 1]), (stored["cube"], turned.permute(2, 1, 0)), (stored["half"], half)])
    assert torch.equal(wide[:, 1].cpu(), tensors["matrix"].float())
    assert not wide[:, 0].any()
    assert torch.equal(turned.permute(2, 1, 0).cpu(), tensors["cube"])
    assert torch.equal(half.cpu(), tensors["half"].bfloat16())


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("long_run_bytes", [1, 1 << 20], ids=["run by run", "runs together"])
@pytest.mark.parametrize(
    ("name", "dim", "part"),
    [
        ("matrix", 0, range(5, 20)),
        ("matrix", 1, range(10, 31)),
        ("matrix", 1, range(53)),
        ("matrix", 1, range(7, 7)),
        ("cube", 0, range(1, 3)),
        ("cube", 1, range(1, 4)),
        ("cube", 2, range(2, 7)),
        ("fp8", 1, range(13, 16)),
        ("half", 0, range(2, 9)),
    ],
)
def test_of_a_tensor_a_part_can_be_read(
    tensors: dict[str, Tensor],
    stored: dict[str, StoredTensor],
    name: str,
    dim: int,
    part: range,
    long_run_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_reader, "_LONG_RUN_BYTES", long_run_bytes)
    expected, piece = tensors[name].narrow(dim, part.start, len(part)), stored[name].part(dim, part)
    assert piece.shape == tuple(expected.shape)
    same, wider = (torch.zeros(expected.shape, dtype=dtype, device=DEVICE) for dtype in (expected.dtype, torch.float32))
    read_into([(piece, same), (piece, wider)])
    assert torch.equal(bits(same), bits(expected))
    assert torch.equal(wider.cpu(), expected.float())


@pytest.mark.usefixtures("_pieces")
def test_parts_can_be_read_to_one_tensor_side_by_side(
    tensors: dict[str, Tensor], stored: dict[str, StoredTensor]
) -> None:
    target = torch.zeros(3, 5, 5, device=DEVICE)
    read_into(
        [(stored["cube"].part(2, range(1, 3)), target[..., :2]), (stored["cube"].part(2, range(4, 7)), target[..., 2:])]
    )
    assert torch.equal(target.cpu(), tensors["cube"][..., [1, 2, 4, 5, 6]])


def test_gaps_between_runs_are_read_only_if_they_are_short(
    stored: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    part, target = stored["matrix"].part(1, range(10, 31)), torch.empty(37, 21, dtype=torch.bfloat16)
    totals = []
    for long_run_bytes in (42, 43):
        monkeypatch.setattr(tensor_reader, "_LONG_RUN_BYTES", long_run_bytes)
        read_into([(part, target)], lambda done, total: totals.append((done, total)))
    assert totals[-2:] == [(2 * 37 * 21, 2 * 37 * 21), (part.stop - part.start, part.stop - part.start)]


def test_progress_counts_every_byte_in_the_callers_thread(
    tensors: dict[str, Tensor], stored: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", 100)
    calls: list[tuple[int, int]] = []
    targets = [(stored[name], torch.empty_like(tensor)) for name, tensor in tensors.items()]
    read_into(targets, lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)
    assert len(calls) > total / 100


def test_one_tensor_as_it_is_stored(tensors: dict[str, Tensor], stored: dict[str, StoredTensor]) -> None:
    assert torch.equal(read_tensor(stored["half"]), tensors["half"])


def test_a_file_that_ends_early_or_is_gone_is_named(
    tensors: dict[str, Tensor], stored: dict[str, StoredTensor]
) -> None:
    file = stored["matrix"].file
    file.write_bytes(file.read_bytes()[:-10])
    targets = [(stored[name], torch.empty_like(tensor)) for name, tensor in tensors.items()]
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors: it ends before byte"):
        read_into(targets)
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors: No such file.*; download"):
        read_into(targets)


def test_threads_stop_when_the_progress_callback_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", 1)
    save_file({"long": torch.ones(200_000, dtype=torch.float16)}, tmp_path / "model.safetensors")
    target = torch.zeros(200_000, dtype=torch.float16)

    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_into([(read_checkpoint(tmp_path)["long"], target)], give_up)
    assert bool((target == 0).any())
