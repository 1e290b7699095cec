"""Validates a client's request before any node receives it."""

import re
import secrets
import unicodedata
import uuid
from collections.abc import Mapping, Sequence

from baton.core.errors import ContextOverflow, InvalidRequest
from baton.core.kv_entries import KEEP_S_MAX, KeepTime
from baton.core.sampling import SAMPLING_FIELDS, ResolvedSampling, SamplingParams
from baton.core.sampling_field import SamplingField
from baton.core.types import AdapterRef
from baton.gateway.core.request import OutputEnd, Outputs
from baton.gateway.text.model import ServedModel
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import sampling_from_proto

_STOP_STRING_CHARACTERS_MAX = 256
_STOP_STRINGS_CHARACTERS_MAX = 4096  # each output keeps every beginning of every stop string
_REQUEST_ID_BYTES_MAX = 256
_OUTPUTS_MAX = 128
# The keep time of a request that has a session and none of its own: the pause between two turns of an agent.
SESSION_KEEP_S = 300.0

_REVISION = re.compile(r"(?P<weights>[0-9a-f]{12})(?:\+(?P<adapter>[0-9a-f]{1,64}))?")
_REVISION_SHOWN = 40

# Unicode categories of control characters and line ends, which could forge log lines.
_FORBIDDEN_IN_IDS = frozenset(("Cc", "Zl", "Zp"))


def check_request_id(request_id: str) -> str:
    """Returns the id, or a random one if the client gave none.

    Raises:
        InvalidRequest: the id is too long or has control characters.
    """
    if not request_id:
        return f"req-{uuid.uuid4().hex}"
    size = len(request_id.encode())
    allowed = (f"up to {_REQUEST_ID_BYTES_MAX} bytes of UTF-8 without control characters",)
    if size > _REQUEST_ID_BYTES_MAX:
        raise InvalidRequest(f"request_id has {size} bytes", field="request_id", value=size, allowed=allowed)
    if not request_id.isprintable() and any(unicodedata.category(each) in _FORBIDDEN_IN_IDS for each in request_id):
        value = ascii(request_id)
        raise InvalidRequest("request_id has a control character", field="request_id", value=value, allowed=allowed)
    return request_id


def check_session_id(session_id: str) -> str:
    """Returns the session id after checking its length.

    Raises:
        InvalidRequest: the id is too long.
    """
    size = len(session_id.encode())
    if size > _REQUEST_ID_BYTES_MAX:
        allowed = (f"up to {_REQUEST_ID_BYTES_MAX} bytes of UTF-8",)
        raise InvalidRequest(f"session_id has {size} bytes", field="session_id", value=size, allowed=allowed)
    return session_id


def check_keep_time(message: pb.GenerateRequest, *, tenant: int) -> KeepTime | None:
    """Returns how long the request's KV is kept; None if the message has neither a time nor a session.

    Raises:
        InvalidRequest: the time is not possible.
    """
    if not message.HasField("kv_keep_s"):
        return KeepTime(SESSION_KEEP_S, tenant) if message.session_id else None
    seconds = message.kv_keep_s
    if not 0 <= seconds <= KEEP_S_MAX:
        allowed = (f"seconds from 0 to {KEEP_S_MAX:.0f}",)
        raise InvalidRequest(f"kv_keep_s is {seconds}", field="kv_keep_s", value=seconds, allowed=allowed)
    return KeepTime(seconds, tenant)


def check_revision(revision: str, adapter: AdapterRef | None = None) -> tuple[str, AdapterRef | None]:
    """Splits the revision of a partial answer into the revision of the weights and the adapter with its revision.

    Args:
        revision: result of `baton.rpc.revisions.answer_revision`; empty: the client has no part of an answer.
        adapter: adapter that the request names as its model, in the revision that serves now; None: the base model.

    Raises:
        InvalidRequest: the revision is malformed, or does not belong to this model.
    """
    if not revision:
        return "", adapter
    found = _REVISION.fullmatch(revision)
    if found is None or (found["adapter"] is None) != (adapter is None):
        value = ascii(revision[:_REVISION_SHOWN])
        allowed = "12 hex digits" if adapter is None else f"12 hex digits + those of the adapter {adapter.name}"
        cure = "name the model that began the answer, or send the request again from its beginning"
        raise InvalidRequest(f"revision is {value}", field="revision", value=value, allowed=(allowed,), cure=cure)
    return found["weights"], None if adapter is None else adapter._replace(revision=found["adapter"])


def check_outputs(request: pb.GenerateRequest, *, max_outputs: int) -> Outputs:
    """Returns how many outputs to sample and to return for the request's `n` and `best_of`.

    Args:
        max_outputs: maximum number of concurrent requests of the gateway.

    Raises:
        InvalidRequest: there are too many outputs, or `best_of` is less than `n`.
    """
    limit = min(_OUTPUTS_MAX, max_outputs)
    n = request.n or 1
    drawn = request.best_of or n
    for field, value, least in (("n", n, 1), ("best_of", drawn, n)):
        if not least <= value <= limit:
            raise InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=(f"{least} to {limit}",))
    return Outputs(drawn, n)


def check_lengths(given: object, names: Mapping[str, SamplingField]) -> None:
    """Refuses long lists in a message before anything else reads them.

    Args:
        names: the sampling parameters by their names in the message.

    Raises:
        InvalidRequest: a list is too long.
    """
    for name, field in names.items():
        if field.items_max is not None and (count := len(getattr(given, name))) > field.items_max:
            message, allowed = f"{name} has {count} elements", (f"up to {field.items_max}",)
            raise InvalidRequest(message, field=name, value=count, allowed=allowed)


def check_sampling(
    message: common_pb2.SamplingParams, model: ServedModel, *, max_tokens: int | None = None
) -> ResolvedSampling:
    """Resolves sampling parameters: the client's values, then those of the model's files, then the defaults.

    A random seed is drawn if the client gave none, so that any node can continue the output.

    Args:
        max_tokens: limit if neither the client nor the model's files set one; None: the default.

    Raises:
        InvalidRequest: a value is not allowed.
    """
    check_lengths(message, SAMPLING_FIELDS)
    given = sampling_from_proto(message)
    drawn = SamplingParams(max_tokens=max_tokens, seed=secrets.randbits(64))
    sampling = given.over(model.default_sampling).over(drawn).resolved()
    model.check_token_ids("sampling.stop_token_ids", list(sampling.stop_token_ids))
    model.check_token_ids("sampling.logit_bias", list(sampling.logit_bias))
    _check_stops(sampling.stop)
    return sampling


def check_text(text: str, model: ServedModel, *, max_context_tokens: int, field: str) -> None:
    """Refuses a text that cannot fit into a context, before it is tokenized.

    Raises:
        ContextOverflow: the text has more bytes than the longest tokens of a whole context.
    """
    limit = max_context_tokens * model.tokenizer.longest_token_bytes
    size = len(text) if len(text) > limit or 4 * len(text) <= limit else len(text.encode())
    if size > limit:
        least = -(-size // model.tokenizer.longest_token_bytes)
        cure = too_long_cure(model, max_context_tokens=max_context_tokens)
        raise ContextOverflow.of(least, max_context_tokens, field=field, cure=cure, at_least=True)


def check_truncation(request: pb.GenerateRequest) -> int | None:
    """Returns how many of the prompt's last tokens to keep, or None to keep all.

    Raises:
        InvalidRequest: no token would be left.
    """
    if not request.HasField("truncate_prompt_tokens"):
        return None
    if not request.truncate_prompt_tokens:
        field = "truncate_prompt_tokens"
        raise InvalidRequest(f"{field} is 0", field=field, value=0, allowed=("1 token or more",))
    return request.truncate_prompt_tokens


def check_prompt(prompt: Sequence[int], model: ServedModel, *, max_context_tokens: int) -> None:
    """Checks a prompt's tokens.

    Raises:
        InvalidRequest: the prompt is empty, too long, or has unknown token ids.
    """
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", field="prompt", allowed=("1 token or more",))
    check_prompt_length(len(prompt), model, max_context_tokens=max_context_tokens)
    model.check_token_ids("prompt", prompt)


def check_prompt_length(num_tokens: int, model: ServedModel, *, max_context_tokens: int) -> None:
    """Checks that a prompt leaves room for an output.

    Raises:
        ContextOverflow: the prompt fills the context.
    """
    if num_tokens >= max_context_tokens:
        cure = too_long_cure(model, max_context_tokens=max_context_tokens)
        raise ContextOverflow.of(num_tokens, max_context_tokens, field="prompt", cure=cure)


def too_long_cure(model: ServedModel, *, max_context_tokens: int) -> str:
    """The cure in the error of a prompt that is too long for the nodes."""
    if max_context_tokens >= model.max_context_tokens:
        return "shorten it"
    return (
        f"shorten it, or give the decode nodes room for the model's {model.max_context_tokens} tokens with "
        "--kv-cache-mib or --max-context-tokens"
    )


def check_output(
    request: pb.GenerateRequest, sampling: ResolvedSampling, model: ServedModel, *, prompt_tokens: int, max_tokens: int
) -> tuple[int, ...]:
    """Returns the output tokens that the client already has.

    Args:
        max_tokens: limit for prompt and output together.

    Raises:
        InvalidRequest: the answer cannot continue after these tokens.
    """
    field, output = "output_token_ids", request.output_token_ids
    if not output:
        return ()
    if max(request.n, request.best_of) > 1:
        cure = "ask for one output, or for all of them from their beginning"
        raise InvalidRequest(f"{field} continues one output, but n or best_of asks for several", field=field, cure=cure)
    if not sampling.greedy and not request.sampling.HasField("seed"):
        cure = "give the seed with which the tokens were sampled"
        raise InvalidRequest(f"{field} was sampled, but the seed is missing", field=field, cure=cure)
    limit = min(sampling.max_tokens, max_tokens - prompt_tokens)
    if len(output) > limit:
        message, allowed = f"{field} has {len(output)} tokens", (f"up to {limit}",)
        raise InvalidRequest(message, field=field, value=len(output), allowed=allowed)
    model.check_token_ids(field, list(output))
    return tuple(output)


def end_of(
    output: Sequence[int], sampling: ResolvedSampling, model: ServedModel, *, max_output: int
) -> OutputEnd | None:
    """The end of an output that is complete with its last token; None if more tokens are due.

    The rules are those of `baton.engine.scheduling.state`, without stop strings.

    Args:
        max_output: maximum number of output tokens.
    """
    if not output:
        return None
    last = output[-1]
    is_stop, is_eos = last in sampling.stop_token_ids, last in model.eos_token_ids
    ends = is_eos and not sampling.ignore_eos
    if (is_eos and sampling.grammar is not None) or ((is_stop or ends) and len(output) > sampling.min_tokens):
        return OutputEnd(common_pb2.FINISH_REASON_STOP, str(last) if is_stop and not ends else "")
    return OutputEnd(common_pb2.FINISH_REASON_LENGTH, "") if len(output) >= max_output else None


def check_prompt_given(request: pb.GenerateRequest) -> None:
    """Checks that a request has a prompt.

    Raises:
        InvalidRequest: the request has no prompt, or an empty one.
    """
    given = request.WhichOneof("prompt")
    if given is None:
        cure = "set `text`, `token_ids` or `chat`"
        raise InvalidRequest("the prompt is missing", field="prompt", allowed=("text", "token_ids", "chat"), cure=cure)
    if given == "chat":
        return
    # NOTE: a tokenizer may make a token of an empty text, but an empty text is still the client's mistake.
    if not (request.text if given == "text" else request.token_ids.ids):
        raise InvalidRequest("the prompt is empty", field="prompt", allowed=("1 token or more",), cure="send some text")


def _check_stops(stops: tuple[str, ...]) -> None:
    for number, stop in enumerate(stops, 1):
        if len(stop) > _STOP_STRING_CHARACTERS_MAX:
            message = f"stop string {number} has {len(stop)} characters"
            allowed = (f"up to {_STOP_STRING_CHARACTERS_MAX} characters",)
            raise InvalidRequest(message, field="stop", value=stop, allowed=allowed)
    if (total := sum(map(len, stops))) > _STOP_STRINGS_CHARACTERS_MAX:
        message = f"the stop strings have {total} characters together"
        allowed = (f"up to {_STOP_STRINGS_CHARACTERS_MAX} characters",)
        raise InvalidRequest(message, field="stop", value=total, allowed=allowed)
