"""Writes docs/troubleshooting.md: each error with its codes, its causes and their cures; `make docs` calls it."""

from pathlib import Path

from baton.core import errors
from baton.core.error_codes import code_of

PAGE = Path(__file__).resolve().parent / "troubleshooting.md"

# For each error: its cause, and what to do.
CAUSES: dict[type[errors.BatonError], tuple[str, str]] = {
    errors.ConfigError: (
        "A setting, flag, variable, file or model directory is wrong. A process exits with code 2, a command with 1"
        " or 2.",
        "The line on stderr names the setting, its value and the allowed values. [Configuration](configuration.md)"
        " lists all settings.",
    ),
    errors.InvalidRequest: (
        "A value of the request is wrong: an unknown parameter or a number out of range.",
        "Change the field that the error names. A retry without a change does not help.",
    ),
    errors.ContextOverflow: (
        "The prompt fills the model's context, so there is no room for output.",
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
        "No node can serve the request: no node is reachable, loaded and paired, or too many nodes failed while "
        "serving it, or no node has the weights that began its answer.",
        "The error says which nodes are loading or unreachable, and which pairs were refused, with the values that "
        "differ and what to change. `baton status` shows all of them. If no node has the weights that began an answer, "
        "send the request again from the beginning:"
        " [Upgrades](upgrades.md#other-weights).",
    ),
    errors.Draining: (
        "The process is being stopped and takes no new requests.",
        "Send the request to another gateway, or retry in a moment. See [Draining](draining.md).",
    ),
    errors.DeadlineExceeded: (
        "The request's deadline passed before its answer was complete.",
        "Allow more time or ask for fewer tokens. The receipt and the metrics show which phase took how long.",
    ),
    errors.Cancelled: (
        "The client closed the call or aborted the request.",
        "Nothing, if that was intended. Otherwise look for a proxy or client with a shorter timeout.",
    ),
    errors.PeerRefused: (
        "A prefill and a decode node cannot pair: their weights, cache dtypes or wire versions do not match, or their"
        " link is too slow.",
        "The error and `baton status` list every mismatch with its cure.",
    ),
    errors.UnknownLease: (
        "KV arrived for a lease that has ended or never existed: the request was cancelled, or the decode node"
        " restarted.",
        "Nothing: the gateway retries. If it happens often, look for nodes that keep restarting.",
    ),
    errors.DataLoss: (
        "KV was corrupted, or a link broke. The node discarded the KV.",
        "Nothing: the gateway retries. If it happens often, check the network; `segments_refused` counts such segments"
        " by node.",
    ),
    errors.InternalError: (
        "A bug in Baton, or logits that are not finite.",
        "Report it with the request id and all log lines of all processes that contain this id.",
    ),
}

_INTRODUCTION = """# Troubleshooting

Every error says what is wrong, which values are allowed, and what to do. Over gRPC, an error is a status with an
`ErrorDetail`. Over HTTP, it is a JSON body with a `message`, a `code` and the `request_id`; search the logs for the
same id. `make docs` generates this page from the code.

## First look

```console
$ baton up
$ baton doctor
$ baton status
```

`baton doctor` checks whether this machine can run a node. `baton status` shows nodes and pairs, and why a node or a
pair is missing.

## Errors by code

gRPC and HTTP use the same table. The last column says whether a retry of the same request may succeed.

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
