"""The assumptions of a captured decode step, checked without a GPU: which batches may replay it, and that the memory
that a graph reads stays in place when later batches are planned."""

from collections.abc import Iterator

from torch import Tensor

from attention.backend import AttentionBackend, MLABackend
from attention.metadata import CommonAttentionMetadata
from tests.conformance.attention.batches import make_batch
from tests.device import DEVICE

DECODES, OTHER_DECODES, WITH_A_PREFILL = [(1, 12), (1, 3)], [(1, 40), (1, 0)], [(1, 12), (2, 3)]


def check_which_batches_replay(backend: AttentionBackend | MLABackend, block_size: int) -> None:
    """Decodes do once they are captured, where the backend declares CUDA graphs; batches with prefills never."""
    decodes, mixed = (make_batch(sizes, block_size, DEVICE).common for sizes in (DECODES, WITH_A_PREFILL))
    if backend.capabilities.cudagraph:
        backend.builder.build_for_cudagraph_capture(decodes)
    assert backend.builder.can_run_in_cudagraph(decodes) is backend.capabilities.cudagraph
    assert not backend.builder.can_run_in_cudagraph(mixed)


def check_memory_stays_in_place(backend: AttentionBackend | MLABackend, block_size: int) -> None:
    """The tensors of the captured metadata lie where those of the next step's metadata lie."""
    step = make_batch(OTHER_DECODES, block_size, DEVICE).common
    captured = dict(_places(backend.builder.build_for_cudagraph_capture(step), "metadata"))
    assert captured
    _move_on(step)
    assert dict(_places(backend.builder.build(0, step), "metadata")) == captured


def _move_on(common: CommonAttentionMetadata) -> None:
    """Other lengths in the same tensors, as between two replays."""
    for lens in {id(lens): lens for lens in (common.seq_lens, common.seq_lens_cpu)}.values():
        lens[1] += 1
    common.num_computed_tokens_cpu[1] += 1


def _places(value: object, path: str) -> Iterator[tuple[str, tuple[int, tuple[int, ...]]]]:
    """Address and shape of every tensor of the device that metadata hold."""
    if isinstance(value, Tensor):
        if value.device.type == DEVICE:
            yield path, (value.data_ptr(), tuple(value.shape))
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _places(member, f"{path}[{key}]")
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            yield from _places(member, f"{path}[{index}]")
    elif type(value).__module__.startswith(("attention.", "kvcache.")):
        for name, member in vars(value).items():
            yield from _places(member, f"{path}.{name}")
