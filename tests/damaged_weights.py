"""Damages a copy of a checkpoint in ways that a sample of its bytes does not see."""

from pathlib import Path

from baton.models.checkpoint.checkpoint import StoredTensor, read_checkpoint


def largest_tensor(model: Path) -> StoredTensor:
    return max(read_checkpoint(model).values(), key=lambda tensor: tensor.stop - tensor.start)


def zero(model: Path, *, num_bytes: int, share: float = 0.5) -> None:
    """Writes zeros into the largest tensor, at this share of its length."""
    tensor = largest_tensor(model)
    with tensor.file.open("r+b") as file:
        file.seek(tensor.start + int((tensor.stop - tensor.start - num_bytes) * share))
        file.write(bytes(num_bytes))


def flip_bit(file: Path, position: int) -> None:
    """Changes the byte at `position` by one bit, in place."""
    with file.open("r+b") as opened:
        opened.seek(position)
        (byte,) = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))
