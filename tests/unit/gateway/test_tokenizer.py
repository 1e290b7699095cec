"""Whole texts to token ids and back, with the tokenizer of a model's directory."""

import asyncio
import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.core.errors import ConfigError
from baton.gateway.text.tokenizer import TextTokenizer
from baton.settings.config import DEMO_MODELS
from tests.unit.gateway.tokenizers import byte_level, token_id

BYTE_LEVEL = byte_level()
BOUND_S = 60.0


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


def test_tokens_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    size = BYTE_LEVEL.get_vocab_size(with_added_tokens=True)
    tokenizer.check_vocabulary(size)
    with pytest.raises(ConfigError, match=rf"token\(s\) beyond the model's vocabulary.*allowed: 0 to {size - 2}"):
        tokenizer.check_vocabulary(size - 1)


def test_special_tokens_beyond_the_models_vocabulary_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_image = Tokenizer.from_str(BYTE_LEVEL.to_str())
    with_image.add_special_tokens(["<image>"])
    with_image.save(str(tmp_path / "tokenizer.json"))
    TextTokenizer(tmp_path).check_vocabulary(token_id(with_image, "<image>"))
    assert "<image>" in caplog.text


def test_a_tokenizer_with_a_huge_id_or_without_tokens_is_refused(tmp_path: Path) -> None:
    whole = json.loads(BYTE_LEVEL.to_str())
    path = tmp_path / "tokenizer.json"
    for vocab, message in (({"far": 10**9}, "has token id 1000000000"), ({}, "has no tokens")):
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": ""}
        path.write_text(json.dumps(whole | {"model": model, "added_tokens": []}))
        with pytest.raises(ConfigError, match=message):
            TextTokenizer(tmp_path)


async def goes_on_during(work: Callable[[int], object]) -> bool:
    """Whether the event loop goes on while a thread does the work. A loop that the thread blocks makes two or three
    rounds each time; any loop may stand still once, because the machine has other work."""
    rounds, end_s = 0, time.monotonic() + BOUND_S

    def repeat() -> bool:
        for number in count():
            if time.monotonic() >= end_s:
                break
            before = rounds
            work(number)
            if rounds - before > 5:
                return True
        return False

    working = asyncio.create_task(asyncio.to_thread(repeat))
    while not working.done():
        await asyncio.sleep(0.001)
        rounds += 1
    return await working


async def test_a_long_text_does_not_block_the_event_loop() -> None:
    tokenizer = TextTokenizer(DEMO_MODELS / "llama")
    long = "Return the number of bytes. " * 20_000
    token_ids = tokenizer.encode(long)
    assert tokenizer.decode(token_ids) == long
    # A text that comes back is not encoded again.
    assert await goes_on_during(lambda number: tokenizer.encode(f"{long}Really {number}."))
    assert await goes_on_during(lambda _: tokenizer.decode(token_ids * 5))
