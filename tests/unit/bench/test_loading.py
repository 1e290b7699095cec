"""The parts of the loading benchmark: checkpoints that load, plain reads that read everything, and the page cache."""

import os
from pathlib import Path

import pytest

from baton.engine.build import build_runner
from baton.settings.node_config import NodeSettings
from bench.llama_checkpoint import Written, llama_of, write_llama
from bench.plain_reads import Plain, cached_share, drop

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_hidden_layers": 3,
}


@pytest.fixture
def written(tmp_path: Path) -> Written:
    _, config = llama_of(1 << 30)
    return write_llama(tmp_path, "small", config | SMALL, num_files=4)


@pytest.mark.parametrize(("gib", "name"), [(1, "Llama-3.2-1B"), (2.3, "Llama-3.2-1B"), (15, "Llama-3.1-8B")])
def test_as_many_layers_as_the_size_wants(gib: float, name: str) -> None:
    work, config = llama_of(round(gib * (1 << 30)))
    assert work.startswith(name)
    per_layer = 2 * config["hidden_size"] * (2.5 * config["hidden_size"] + 3 * config["intermediate_size"])
    embeddings = 2 * config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)
    assert abs(config["num_hidden_layers"] * per_layer + embeddings - gib * (1 << 30)) < per_layer


def test_a_written_checkpoint_loads(written: Written) -> None:
    assert len(written.files) == 4
    directory = written.files[0].parent
    built = build_runner(NodeSettings(model=directory, dtype="bfloat16", device="cpu", num_blocks=4))
    weights = [parameter.float() for parameter in built.runner.model.parameters()]
    # Apart from config, header and index the files hold nothing else.
    assert 0 <= written.num_bytes - 2 * sum(weight.numel() for weight in weights) < 1 << 14
    assert all(0.01 < float(weight.std()) < 0.03 for weight in weights)


@pytest.mark.parametrize("plain", [Plain(1), Plain(3, piece_bytes=1 << 13), Plain(2, direct=True)], ids=str)
def test_a_plain_read_reads_every_page(plain: Plain, written: Written, tmp_path: Path) -> None:
    drop(written.files)
    assert plain.seconds(written.files) > 0
    if not plain.direct:
        assert cached_share(written.files) == 1
    with pytest.raises(FileNotFoundError):
        plain.seconds([*written.files, tmp_path / "none"])


def test_a_failure_in_a_thread_is_raised(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        Plain(2).seconds([tmp_path / "directory"])


def test_the_share_of_cached_pages_is_counted(tmp_path: Path) -> None:
    """A hole in a file has no page until it is read."""
    file = tmp_path / "holes"
    with file.open("wb") as opened:
        opened.truncate(1 << 20)
    drop([file])
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        opened.read(1 << 18)
    assert cached_share([file]) == 0.25
