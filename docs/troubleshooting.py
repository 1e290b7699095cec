"""Writes docs/troubleshooting.md: each error with its codes, its causes and their cures; `make docs` calls it."""

from pathlib import Path

from baton.core import errors
from baton.core.error_codes import code_of

PAGE = Path(__file__).resolve().parent / "troubleshooting.md"

# Of each error: what causes it, and what to do.
CAUSES: dict[type[errors.BatonError], tuple[str, str]] = {
    errors.ConfigError: (
        "A setting, flag, variable, file or model directory is wrong. A process ends with exit code 2, a command with 1"
        " or 2.",
        "The line on stderr names the setting, its value and the allowed values. [Configuration](configuration.md)"
        " lists all settings.",
    ),
    errors.InvalidRequest: (
        "A value of the request is wrong: an unknown parameter or a number out of range.",
        "Change the field that the error names. Trying again unchanged does not help.",
    ),
    errors.ContextOverflow: (
        "The prompt fills the context, so there is no room for an output.",
        "Shorten the prompt, or keep its last tokens with `truncate_prompt_tokens`.",
    ),
    errors.Unauthenticated: (
        "The gateway requires a key, and the request has none or an unknown one. Or a process showed no valid"
        " certificate.",
        "Send `authorization: Bearer KEY`, or set `BATON_API_KEY`. Check that all certificates come from one CA and"
        " have not expired.",
    ),
    errors.PermissionDenied: (
        "The key or the certificate is valid, but does not allow this call. Only operators may ask for the cluster's"
        " status.",
        "Use an operator's key: `baton key NAME --operator`. [Security](security.md#who-may-do-what) has the table.",
    ),
    errors.UnknownModel: (
        "The request names a model that this gateway does not serve.",
        "Ask `/v1/models` for the name, leave `model` empty, or set `--model-name`.",
    ),
    errors.Overloaded: (
        "The queue is full or too long for the deadline, or a limit of the key is reached.",
        "Try again after the time in `retry-after`. If the error persists, add nodes: [Sizing](planning.md).",
    ),
    errors.NoNode: (
        "No node can take the request: none is reachable, has loaded or is paired, too many nodes failed it, or none "
        "has the weights that began its answer.",
        "The error says which nodes are loading or unreachable, and which pairs were refused, with the values that "
        "differ and what to change. `baton status` shows all of them. If the "
        "weights of an answer are gone, send the request again from its beginning:"
        " [Upgrades](upgrades.md#other-weights).",
    ),
    errors.Draining: (
        "The process is being stopped and takes no new requests.",
        "Send the request to another gateway, or again in a moment. [Draining](draining.md).",
    ),
    errors.DeadlineExceeded: (
        "The request's deadline passed before its answer was complete.",
        "Allow more time or fewer tokens. The receipt and the metrics show which phase took the time.",
    ),
    errors.Cancelled: (
        "The client closed the call or aborted the request.",
        "Nothing, if that was intended. Otherwise look for a proxy or client with a shorter time limit.",
    ),
    errors.PeerRefused: (
        "A prefill and a decode node cannot work together: other weights, cache dtype or wire version, or a slow link.",
        "The error and `baton status` list every mismatch with its cure.",
    ),
    errors.UnknownLease: (
        "KV arrived for a lease that has ended or never existed: the request was cancelled, or the decode node"
        " restarted.",
        "Nothing: the gateway tries again. If it happens often, look for nodes that restart.",
    ),
    errors.DataLoss: (
        "KV was damaged, or a link broke. The KV was not used.",
        "Nothing: the gateway tries again. If it happens often, check the network; `segments_refused` counts by node.",
    ),
    errors.InternalError: (
        "A bug in Baton, or logits that are not finite.",
        "Report it with the request id and the log lines that contain it, from all processes.",
    ),
}

_INTRODUCTION = """# Troubleshooting

Every error names what is wrong, the allowed values if there are any, and what to do. Over gRPC, an error is a status
with an `ErrorDetail`. Over HTTP, it is a JSON body with a `message`, a `code` and the `request_id`; the logs of every
process that the request reached have the same id. `make docs` writes this page from the errors of the code.

## First look

```console
$ baton up
$ baton doctor
$ baton status
```

`baton doctor` checks whether this machine can run a node. `baton status` shows nodes and pairs, and why one is missing.

## Errors by code

Both doors follow one table. A retry of the same request may succeed where the table says so.

| error | reason | gRPC | HTTP | `type` in HTTP | retry |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The page's text."""
    ordered = list(CAUSES)
    rows = [
        f"| [{_name(row.error)}](#{_name(row.error).lower()}) | `{row.error.reason}` | `{row.grpc}` | {row.http} "
        f"| `{row.openai_type}` | {'yes' if row.retryable else ''} |\n"
        for row in map(code_of, ordered)
    ]
    sections = [
        f"\n### {_name(error)}\n\n"
        f"Reason `{error.reason}`, gRPC `{code_of(error).grpc}`, HTTP {code_of(error).http}.\n\n"
        f"- **Cause.** {cause}\n- **Cure.** {cure}\n"
        for error, (cause, cure) in CAUSES.items()
    ]
    return _INTRODUCTION + "".join(rows) + "".join(sections)


def _name(error: type[errors.BatonError]) -> str:
    return error.__name__


if __name__ == "__main__":
    PAGE.write_text(page())
