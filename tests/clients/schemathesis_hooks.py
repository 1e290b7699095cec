"""What schemathesis changes in its requests so that Baton serves thousands in minutes, and its record of the answers.

Outputs become short, models and roles real, so that more requests get past the first check. All else stays as drawn.
Loaded by schemathesis in its own environment.
"""

# mypy: disable-error-code="import-not-found,untyped-decorator"

import json
import os
from pathlib import Path
from typing import Any

import schemathesis

RECORD = Path(os.environ["SCHEMATHESIS_RECORD"])

_MAXIMA = {
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "max_output_tokens": 16,
    "min_tokens": 2,
    "n": 2,
    "best_of": 3,
}
# What ends an output that would otherwise end with the context.
_LIMITS = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
_PROMPTS_MAX = 4
_MESSAGE = {"role": "user", "content": "What does zip do?"}


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    if not isinstance(case.body, dict):
        return
    body = dict(case.body)
    limit = _LIMITS.get(case.path)
    if limit is not None and body.get(limit) is None:
        body[limit] = _MAXIMA[limit]
    for name, maximum in _MAXIMA.items():
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and maximum < value < 1 << 32:
            body[name] = maximum
    if isinstance(body.get("model"), str):
        body["model"] = "llama"
    if isinstance(body.get("prompt"), list):
        body["prompt"] = body["prompt"][:_PROMPTS_MAX]
    if body.get("input") == "":
        body["input"] = _MESSAGE["content"]
    if isinstance(body.get("messages"), list):
        body["messages"] = [_filled(message) if isinstance(message, dict) else message for message in body["messages"]]
    case.body = body


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    return _MESSAGE | {name: value for name, value in message.items() if value not in ("", [])}


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    line = {
        "method": case.method,
        "path": case.path,
        "status": response.status_code,
        "elapsed_s": response.elapsed,
        "answer": response.content[:300].decode(errors="replace"),
        "body": repr(case.body)[:2000],
    }
    with RECORD.open("a") as record:
        record.write(json.dumps(line) + "\n")
