"""Writes the page /docs from the OpenAPI schema: one section for each endpoint, one for each kind of object."""

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from starlette.responses import Response

from baton.gateway.http.call import HttpCall
from baton.gateway.http.client_fields import IGNORED, NO_EFFECT
from baton.gateway.http.docs.html import base_url, code, curl, document, link

Schema = Mapping[str, Any]

_BASE_URL = "@BASE_URL@"  # stands for the URL under which the client reaches the gateway
_TURN = [{"role": "user", "content": "What does zip do?"}]
_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": _TURN, "max_tokens": 32},
    "/v1/completions": {"prompt": "The function zip", "max_tokens": 32},
    "/v1/responses": {"input": "What does zip do?", "max_output_tokens": 32},
    "/v1/messages": {"messages": _TURN, "max_tokens": 32},
    "/v1/messages/count_tokens": {"messages": _TURN},
    "/tokenize": {"prompt": "The function zip"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_INTRODUCTION = """
<p>Bodies are JSON objects. A field that is not listed here is refused, unless the gateway was started with
<code>--unknown-fields warn</code>. A field that is null counts as absent.</p>
<h2 id="every-request">Every request</h2>
<p>Headers that every endpoint takes:</p>
<ul>
<li><code>authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>, where the gateway requires a key</li>
<li><code>x-request-id</code>: names the request in answers, errors and logs</li>
<li><code>x-request-timeout-s</code>: the deadline in seconds</li>
<li><code>x-baton-receipt: 1</code>: asks for the receipt, which says which nodes served the request</li>
</ul>
<p>A header <code>x-baton-warning</code> of an answer names a part of the request that was served without effect. An
answer may have several.</p>
<p>An error has a status of 400 or more and a JSON body. Its <code>message</code> names the field, the value and what is
allowed, and its <code>param</code> is the field.</p>
"""


async def docs(call: HttpCall) -> Response:
    # Written once for each process, because that takes milliseconds, and anyone may ask for it.
    app = call.request.app
    if not hasattr(app.state, "docs"):
        app.state.docs = _body(app.openapi(), locked=call.context.settings.locked)
    return document("Baton: HTTP API", app.state.docs.replace(_BASE_URL, escape(base_url(call))))


def _body(schema: Schema, *, locked: bool) -> str:
    endpoints = list(_endpoints(schema))
    objects: Schema = schema.get("components", {}).get("schemas", {})
    bodies = {_name(body) for *_, body in endpoints if body}
    others = sorted(name for name in objects if name not in bodies and objects[name].get("properties"))
    contents = "".join(
        f"<li>{link(f'#{_anchor(method, path)}', f'{method} {path}')} {escape(summary)}</li>"
        for method, path, summary, _ in endpoints
    )
    parts = [
        f"<h1>{escape(schema['info']['title'])} {escape(schema['info']['version'])}: HTTP API</h1>",
        f"<p>{link('/', 'About this gateway')}. {link('/openapi.json', 'The same as an OpenAPI schema')}.</p>",
        f"<ul>{contents}</ul>",
        _INTRODUCTION,
        *(_endpoint(objects, *endpoint, locked=locked) for endpoint in endpoints),
        '<h2 id="objects">Objects</h2>',
        *(_object(objects, name) for name in others),
    ]
    return "\n".join(parts)


def _endpoints(schema: Schema) -> Iterator[tuple[str, str, str, Schema]]:
    """Yields method, path, summary and the schema of the body, which may be empty."""
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            yield (
                method.upper(),
                path,
                operation.get("summary", ""),
                content.get("application/json", {}).get("schema", {}),
            )


def _endpoint(objects: Schema, method: str, path: str, summary: str, body: Schema, *, locked: bool) -> str:
    anchor = _anchor(method, path)
    parts = [f'<h2 id="{anchor}">{code(f"{method} {path}")}</h2>', f"<p>{escape(summary)}.</p>"]
    if path in _EXAMPLES:
        parts.append(curl(f"{_BASE_URL}{path}", json.dumps(_EXAMPLES[path]), locked=locked))
    if body:
        parts.append(_table(anchor, objects[_name(body)]))
    return "\n".join(parts)


def _object(objects: Schema, name: str) -> str:
    schema, anchor = objects[name], _object_anchor(name)
    text = _prose(schema.get("description", ""))
    return f'<h3 id="{anchor}">{code(_short(name))}</h3>\n<p>{text}</p>\n{_table(anchor, schema)}'


def _table(anchor: str, schema: Schema) -> str:
    required = set(schema.get("required", ()))
    fields = sorted(schema.get("properties", {}).items(), key=lambda item: _rank(item[1], needed=item[0] in required))
    rows = [
        f'<tr id="{escape(anchor)}.{escape(name)}"><th scope="row">{code(name)}</th><td>{_type(field)}</td>'
        f"<td>{_default(field, needed=name in required)}</td><td>{_prose(field.get('description', ''))}</td></tr>"
        for name, field in fields
    ]
    head = "".join(f'<th scope="col">{title}</th>' for title in ("field", "type", "default", "meaning"))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _rank(field: Schema, *, needed: bool) -> int:
    """Orders a table: required fields, those with an effect, ignored ones, refused ones."""
    if needed:
        return 0
    if field.get("type") == "null":
        return 3
    return 2 if field.get("description") in (IGNORED, NO_EFFECT) else 1


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _default(field: Schema, *, needed: bool) -> str:
    if needed:
        return '<span class="need">required</span>'
    default = field.get("default")
    return "" if default in (None, "", []) or isinstance(default, dict) else code(json.dumps(default))


def _type(schema: Schema) -> str:
    """Returns the type in words, as HTML with links to objects."""
    if "$ref" in schema:
        return link(f"#{_object_anchor(_name(schema))}", _short(_name(schema)))
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return (
            " or ".join(dict.fromkeys(_type(each) for each in choices if each.get("type") != "null")) or "not supported"
        )
    if "enum" in schema or "const" in schema:
        return ", ".join(code(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "null":
        return "not supported"
    if not isinstance(kind, str):
        return "any value"
    bounds = [f"{word} {_number(schema[name])}" for name, word in _BOUNDS.items() if name in schema]
    pattern = f" like {code(schema['pattern'])}" if "pattern" in schema else ""
    return escape(", ".join([_KINDS.get(kind, kind), *bounds])) + pattern


_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_KINDS = {"boolean": "true or false"}


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _short(name: str) -> str:
    """Returns a schema's name without its module, which pydantic adds where two schemas have the same name."""
    return name.rpartition("__")[2]


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _object_anchor(name: str) -> str:
    return f"object-{re.sub('[^A-Za-z0-9_-]', '-', name)}"


def _anchor(method: str, path: str) -> str:
    return re.sub("[^a-z0-9_]+", "-", f"{method}-{path}".lower()).strip("-")
