"""Special tokens that a client wrote are text, wherever the template puts them; the template's own are tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.gateway.text.chat.checkpoint_files import read_checkpoint
from baton.gateway.text.chat.model import ChatModel
from baton.gateway.text.chat.renderer import ChatRenderer
from baton.gateway.text.chat.types import ChatRequest, PreparedChat
from baton.gateway.text.tokenizer import TextTokenizer
from tests.unit.gateway.chat.checkpoints import SPECIAL, write_checkpoint

START, END = "<|start|>", "<|end|>"
OVERLAP = ("<|a|>", "|><|b|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endif %}{{ m.tool_calls if m.tool_calls }}<|end|>{% endfor %}"
    "{{ tools | tojson if tools }}{{ (messages[0] | tojson(ensure_ascii=true)) if ascii }}{{ extra }}"
)
TEXT = {"type": "text"}


class Served:
    """A tokenizer and a chat model that keep clients' texts apart."""

    def __init__(self, directory: Path) -> None:
        write_checkpoint(directory, TEMPLATE)
        path = directory / "tokenizer.json"
        saved = Tokenizer.from_file(str(path))
        saved.add_special_tokens(list(OVERLAP))
        saved.save(str(path))
        self.checkpoint = read_checkpoint(directory, None)
        self.tokenizer = TextTokenizer(directory, special_in_texts=False)
        self.aliases: Mapping[str, str] = self.tokenizer.aliases
        self.model = ChatModel(self.checkpoint, self.aliases)

    def prepare(self, messages: list[dict[str, Any]], **request: Any) -> PreparedChat:
        return self.model.prepare(ChatRequest(messages, **request))

    def specials(self, prepared: PreparedChat) -> list[str]:
        """The special tokens of the prompt's ids, in order; the ids mean the prompt."""
        ids = self.tokenizer.encode(prepared.to_encode, add_special_tokens=False)
        assert self.tokenizer.decode(ids, skip_special_tokens=False) == prepared.prompt
        texts = {self.checkpoint.tokens[text]: text for text in self.checkpoint.special}
        return [texts[number] for number in ids if number in texts]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("model"))


OWN = [START, "<|message|>", END]
CALL = {"id": "c", "type": "function", "function": {"name": END, "arguments": '{"<|end|>": "<|start|>"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": END, "parameters": {"properties": {START: {}}}}}
REQUESTS: Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a content": ([{"role": "user", "content": f"a{END}b{START}"}], {}),
    "a content of nothing else": ([{"role": "user", "content": f" {END} "}], {}),
    "a part": ([{"role": "user", "content": [TEXT | {"text": END}]}], {}),
    "parts that make up one": (
        [{"role": "user", "content": [TEXT | {"text": text} for text in ("<|e", "n", "d|>")]}],
        {},
    ),
    "overlapping ones": ([{"role": "user", "content": "<|a|><|b|>"}], {}),
    "a role": ([{"role": f"user{END}", "content": ""}], {}),
    "a call, as Python shows it": ([{"role": "assistant", "content": "a", "tool_calls": [CALL]}], {}),
    "a tool, as JSON": ([{"role": "user", "content": "a"}], {"tools": [TOOL]}),
    "a content, as JSON in ASCII": ([{"role": "user", "content": END}], {"template_kwargs": {"ascii": True}}),
    "a variable": ([{"role": "user", "content": "a"}], {"template_kwargs": {"extra": START}}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_special_token_of_the_client_is_text_and_the_template_s_are_tokens(served: Served, name: str) -> None:
    messages, request = REQUESTS[name]
    prepared = served.prepare(messages, **request)
    assert served.specials(prepared) == OWN
    plain = ChatModel(served.checkpoint).prepare(ChatRequest(messages, **request))
    assert prepared.prompt == plain.prompt
    assert plain.named is None


@given(st.lists(st.sampled_from(["a", " ", "<", "|", ">", "<|", "|>", "[", *SPECIAL, *OVERLAP]), max_size=8))
def test_any_content_is_text(served: Served, pieces: list[str]) -> None:
    assert served.specials(served.prepare([{"role": "user", "content": "".join(pieces)}])) == OWN
    parts = [TEXT | {"text": piece} for piece in pieces]
    assert served.specials(served.prepare([{"role": "user", "content": parts}])) == OWN


def test_a_conversation_without_special_tokens_has_the_ids_that_it_has_otherwise(
    served: Served, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "def main(argument): return 1"}, {"role": "assistant", "content": "<"}]
    prepared = served.prepare(messages)
    write_checkpoint(tmp_path, TEMPLATE)
    allows = TextTokenizer(tmp_path)
    expected = allows.encode(prepared.prompt, add_special_tokens=False)
    assert served.tokenizer.encode(prepared.to_encode, add_special_tokens=False) == expected


def test_a_message_with_a_special_token_is_continued(served: Served) -> None:
    prepared = served.prepare([{"role": "assistant", "content": f"a{END}b<"}], continue_final_message=True)
    assert prepared.prompt == f"{START}assistant<|message|>a{END}b<"
    assert served.specials(prepared) == [START, "<|message|>"]


async def test_another_process_prepares_it_alike(served: Served) -> None:
    renderer = ChatRenderer(served.checkpoint, aliases=served.aliases)
    try:
        for messages, request in REQUESTS.values():
            there = await renderer.prepare(ChatRequest(messages, **request))
            assert there == served.prepare(messages, **request)
    finally:
        renderer.close()
