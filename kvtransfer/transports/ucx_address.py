"""The address of a UCX worker as nodes exchange it: framed, so that other and damaged bytes never reach UCX. Pure.

UCX itself checks nothing: a made-up address with a right checksum may end the process that uses it (`ucx_probe`).
"""

import zlib

from baton.core.errors import PeerRefused

# This prefix, a checksum of the rest, whether the node offers GPU memory, and the worker's address.
_MAGIC = b"baton-ucx-2:"
_CHECKSUM_BYTES = 4
_ON_GPU = {True: b"g", False: b"h"}
# A worker's address begins with a header byte, whose lower half is the format's version, and 8 bytes of identifier.
_WORKER_BYTES_MIN = 1 + 8
_VERSION_MASK = 0x0F
_VERSIONS = (0, 1)


def wrap(worker: bytes, *, on_gpu: bool) -> bytes:
    content = _ON_GPU[on_gpu] + worker
    return _MAGIC + _checksum(content) + content


def is_on_gpu(address: bytes) -> bool:
    """Whether the node offers GPU memory. The address must have passed `worker_address`."""
    return _split(address)[1][:1] == _ON_GPU[True]


def worker_address(address: bytes) -> bytes:
    """The worker's own address.

    Raises:
        PeerRefused: this is not an address of this format, or it is damaged.
    """
    checksum, content = _split(address)
    framed = address.startswith(_MAGIC) and _checksum(content) == checksum
    whole = len(content) > _WORKER_BYTES_MIN and content[:1] in _ON_GPU.values()
    if not framed or not whole or content[1] & _VERSION_MASK not in _VERSIONS:
        raise PeerRefused(
            "the peer's address is not one of a UCX worker",
            field="address",
            value=address[:40],
            cure="start both nodes with the same --transport and the same package version",
        )
    return content[1:]


def _split(address: bytes) -> tuple[bytes, bytes]:
    framed = address[len(_MAGIC) :]
    return framed[:_CHECKSUM_BYTES], framed[_CHECKSUM_BYTES:]


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")
