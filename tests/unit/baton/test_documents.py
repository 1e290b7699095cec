"""Pages that are written from code are up to date, and their examples work."""

import json
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from baton.core.types import GrammarKind
from baton.gateway.http.bodies import ChatBody
from baton.gateway.http.translate import grammar_of
from baton.gateway.text.model import read_served_model
from baton.settings.config import DEMO_MODELS
from docs import api, attention, configuration, metrics, tracing

EXAMPLE = re.compile(r'^\|.*\| `(\{"(?:response_format|structured_outputs)".*\})` \|$', re.MULTILINE)


def test_the_configuration_page_is_made_from_the_settings() -> None:
    assert configuration.PAGE.read_text() == configuration.page(), "run `make docs`"


def test_the_page_of_metrics_is_made_from_their_table() -> None:
    assert metrics.PAGE.read_text() == metrics.page(), "run `make docs`"


def test_the_page_of_traces_is_made_from_the_table_of_spans() -> None:
    assert tracing.PAGE.read_text() == tracing.page(), "run `make docs`"


@pytest.mark.parametrize("page", [api.PAGE, api.STRUCTURED], ids=lambda page: page.name)
def test_a_page_of_the_http_api_has_the_tables_that_the_code_makes(page: Path) -> None:
    assert page.read_text() == api.page(page), "run `make docs`"


def test_every_table_has_its_place_on_a_page() -> None:
    texts = "".join(page.read_text() for page in (api.PAGE, api.STRUCTURED, api.POOLED))
    assert [name for name in api.tables() if f"<!-- table: {name} -->" not in texts] == []


def test_the_page_of_attention_backends_is_made_from_their_capabilities() -> None:
    assert attention.PAGE.read_text() == attention.page(), "run `make docs`"


@pytest.mark.parametrize("name", [ours for _, ours in attention.NAMES])
def test_every_name_in_its_table_of_names_exists(name: str) -> None:
    assert resolve_name(name) is not None


async def test_every_example_of_a_structured_output_is_accepted() -> None:
    model = read_served_model(DEMO_MODELS / "llama", None)
    kinds = set()
    for example in EXAMPLE.findall(api.STRUCTURED.read_text()):
        body = ChatBody.model_validate({"messages": [{}], **json.loads(example)})
        grammar, _ = grammar_of(body)
        assert grammar is not None
        await model.grammars.check(grammar)
        kinds.add(grammar.kind)
    model.close()
    assert kinds == set(GrammarKind)
