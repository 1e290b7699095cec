"""Where the tokens of a completion begin in its text."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.gateway.http.logprobs import CompletionLogprobs, LogprobWriter
from baton.gateway.text.tokenizer import TextTokenizer
from baton.protos.v1 import common_pb2
from tests.unit.gateway.tokenizers import byte_fallback, byte_level

TEXTS = ["naïve café", "a€😀é", "日本語 is 日本", " the fox", "\r\x01\n"]
SETTINGS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    made: Tokenizer = request.param()
    made.save(str(directory / "tokenizer.json"))
    return TextTokenizer(Path(directory))


def offsets(tokenizer: TextTokenizer, token_ids: list[int], *, with_prompt: bool) -> list[int]:
    tokens = [common_pb2.Token(token_id=token_id, logprob=-1.0) for token_id in token_ids]
    writer = CompletionLogprobs(LogprobWriter(tokenizer, as_ids=False), with_prompt=with_prompt)
    found: list[int] = [*writer.write(tokens[:2])["text_offset"], *writer.write(tokens[2:])["text_offset"]]
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_each_token_of_an_echoed_prompt_begins_where_its_character_does(tokenizer: TextTokenizer, text: str) -> None:
    """BOS has no place in the text, nor has the space that a decoder drops before the first word."""
    token_ids = tokenizer.encode(text)
    spelled = [b"" if token_id < 3 else tokenizer.token_bytes(token_id) for token_id in token_ids]
    shown, dropped = tokenizer.decode(token_ids), len(b"".join(spelled).decode()) - len(tokenizer.decode(token_ids))
    before = [len(b"".join(spelled[:count]).decode(errors="ignore")) for count in range(len(token_ids))]
    places = offsets(tokenizer, token_ids, with_prompt=True)
    assert places == [max(0, count - dropped) for count in before]
    assert places[-1] < len(shown)


@pytest.mark.parametrize("with_prompt", [True, False])
@SETTINGS
@given(data=st.data())
def test_no_token_of_any_output_begins_beyond_the_text(
    tokenizer: TextTokenizer, with_prompt: bool, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 300), max_size=30))
    places = offsets(tokenizer, token_ids, with_prompt=with_prompt)
    text = tokenizer.text_after(is_prompt=with_prompt, skip_special_tokens=True)
    whole = text.push(*token_ids) + text.finish()
    assert places == sorted(places)
    assert all(0 <= place <= len(whole) for place in places)
