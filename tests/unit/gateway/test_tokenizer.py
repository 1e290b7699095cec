"""Whole texts to token ids and back, with the tokenizer of a model's directory."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.config import DEMO_MODELS
from baton.errors import ConfigError
from gateway.tokenizer import TextTokenizer
from tests.unit.gateway.tokenizers import byte_level, token_id

BYTE_LEVEL = byte_level()


def test_it_encodes_with_the_tokens_that_the_model_expects(tmp_path: Path) -> None:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    token_ids = tokenizer.encode("the fox")
    assert token_ids[0] == token_id(BYTE_LEVEL, "<bos>")
    assert tokenizer.decode(token_ids) == "the fox"


def test_it_neither_truncates_nor_pads_even_if_the_file_asks_for_it(tmp_path: Path) -> None:
    trained = Tokenizer.from_str(BYTE_LEVEL.to_str())
    trained.enable_truncation(max_length=4)
    trained.enable_padding(length=32)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    for words in ("fox", "the quick brown fox"):
        assert tokenizer.encode(words) == BYTE_LEVEL.encode(words).ids


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        TextTokenizer(tmp_path)


async def rounds_during(work: Callable[[], object]) -> int:
    """Iterations of the event loop while a thread does the work. A loop that the thread blocks makes two or three."""
    working = asyncio.create_task(asyncio.to_thread(work))
    rounds = 0
    while not working.done():
        await asyncio.sleep(0.001)
        rounds += 1
    await working
    return rounds


async def test_a_long_text_does_not_block_the_event_loop() -> None:
    tokenizer = TextTokenizer(DEMO_MODELS / "llama")
    long = "Return the number of bytes. " * 20_000
    token_ids = tokenizer.encode(long)
    assert tokenizer.decode(token_ids) == long
    new = f"{long}Really."  # a text that comes back is not encoded again
    assert await rounds_during(lambda: tokenizer.encode(new)) > 5
    assert await rounds_during(lambda: tokenizer.decode(token_ids * 5)) > 5
