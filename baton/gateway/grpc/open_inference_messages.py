"""Translates Open Inference messages to Baton's and back. Pure.

A request's prompt is in the tensor `text_input`. Its sampling parameters, named as in SamplingParams, are parameters of
the request or JSON in the tensor `sampling_parameters`, as in Triton's vLLM backend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.gateway.core.json_reader import DuplicateKey, NotJson, TooManyValues, parse_json
from baton.gateway.grpc.tensors import OutputTensors, read_inputs, write_outputs
from baton.protos.inference import open_inference_pb2 as oip
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import finish_reason_from_proto

INPUTS = {"text_input": "BYTES", "sampling_parameters": "BYTES", "stream": "BOOL", "exclude_input_in_output": "BOOL"}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
VERSION = "1"

_REQUEST_PARAMETERS = ("priority", "cache_salt", "truncate_prompt_tokens", "add_special_tokens")
_GIVEN_MAX = 256  # inputs, outputs or parameters
_LISTED_MAX = 1024  # values of one parameter, as `baton.gateway.serving.validate`
_PARAMETERS_BYTES_MAX = 1 << 18
_SHOWN_CHARACTERS = 80
_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class InferenceRequest:
    """A request as Baton's message, and the form that its response must have."""

    message: pb.GenerateRequest
    stream: bool
    echo: bool  # the output begins with the prompt
    raw: bool  # outputs are raw bytes


def read_request(request: oip.ModelInferRequest) -> InferenceRequest:
    """Translates an inference request.

    Raises:
        InvalidRequest: a tensor or parameter is wrong; the error names it.
    """
    check_version(request.model_version)
    for field, given in (("inputs", request.inputs), ("outputs", request.outputs), ("parameters", request.parameters)):
        if len(given) > _GIVEN_MAX:
            allowed = (f"up to {_GIVEN_MAX}",)
            raise InvalidRequest(f"{field} has {len(given)} elements", field=field, value=len(given), allowed=allowed)
    unknown = [output.name for output in request.outputs if output.name not in OUTPUTS]
    if unknown:
        raise InvalidRequest(
            f"there is no output {unknown[0]!r}", field="outputs", value=unknown[0], allowed=tuple(OUTPUTS)
        )
    inputs = read_inputs(request, INPUTS)
    if "text_input" not in inputs:
        raise InvalidRequest("the input text_input is missing", field="inputs", allowed=("text_input",))
    parameters = {name: _parameter(value) for name, value in request.parameters.items()}
    parameters |= _json_parameters(inputs.get("sampling_parameters", b"{}"))
    stream = _boolean("stream", inputs.get("stream", parameters.pop("stream", False)))
    exclude = inputs.get("exclude_input_in_output", parameters.pop("exclude_input_in_output", True))
    message = pb.GenerateRequest(model=request.model_name, request_id=request.id, text=_text(inputs["text_input"]))
    _set_parameters(message, {name: value for name, value in parameters.items() if not name.startswith("triton_")})
    return InferenceRequest(
        message,
        stream=stream,
        echo=not _boolean("exclude_input_in_output", exclude),
        raw=bool(request.raw_input_contents),
    )


def check_version(version: str) -> None:
    """Checks the model version that a request names.

    Raises:
        InvalidRequest: the model has no such version.
    """
    if version not in ("", VERSION):
        raise InvalidRequest(f"there is no version {version!r}", field="version", value=version, allowed=(VERSION,))


def to_response(
    request: oip.ModelInferRequest,
    output: pb.Output,
    usage: common_pb2.Usage | None,
    *,
    name: str,
    raw: bool,
    final: bool | None = None,
) -> oip.ModelInferResponse:
    """Builds the response for one output, or for a part of one.

    Args:
        usage: None if it is not known yet; the response then has no counts.
        name: the model's name.
        raw: write outputs as raw bytes.
        final: in a stream, whether this is the request's last response; else None.
    """
    response = oip.ModelInferResponse(model_name=name, model_version=VERSION, id=request.id)
    values: dict[str, str | int] = {
        "text_output": output.text,
        "finish_reason": finish_reason_from_proto(output.finish_reason) or "",
    }
    if usage is not None:
        values |= {"num_input_tokens": usage.prompt_tokens, "num_output_tokens": usage.completion_tokens}
    wanted = [each.name for each in request.outputs] or list(OUTPUTS)
    write_outputs(response, [OutputTensors(each, values[each]) for each in wanted if each in values], raw=raw)
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    return response


def _parameter(value: oip.InferParameter) -> Any:
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def _json_parameters(data: bytes) -> dict[str, Any]:
    field = "inputs.sampling_parameters"
    if len(data) > _PARAMETERS_BYTES_MAX:
        allowed = (f"up to {_PARAMETERS_BYTES_MAX} bytes",)
        raise InvalidRequest(f"{field} has {len(data)} bytes", field=field, value=len(data), allowed=allowed)
    try:
        given = parse_json(data)
    except (NotJson, TooManyValues, DuplicateKey) as error:
        raise InvalidRequest(f"sampling_parameters is not JSON: {error}", field=field) from None
    if not isinstance(given, dict):
        raise InvalidRequest("sampling_parameters is not a JSON object", field=field)
    return given


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        cure = "send UTF-8"
        raise InvalidRequest(f"text_input cannot be read: {error}", field="inputs.text_input", cure=cure) from None


def _set_parameters(message: pb.GenerateRequest, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        target: Any = message if name in _REQUEST_PARAMETERS else message.sampling
        field = target.DESCRIPTOR.fields_by_name.get(name)
        if field is None or field.message_type is not None:
            known = [each.name for each in message.sampling.DESCRIPTOR.fields if each.message_type is None]
            raise InvalidRequest(
                f"there is no parameter {name!r}",
                field="parameters",
                value=name,
                allowed=(*known, *_REQUEST_PARAMETERS),
            )
        if not field.is_repeated:
            setattr(target, name, _read(name, field, value))
        elif not isinstance(value, list):
            getattr(target, name).append(_read(name, field, value))
        elif len(value) <= _LISTED_MAX:
            getattr(target, name).extend(_read(f"{name}[{index}]", field, each) for index, each in enumerate(value))
        else:
            allowed = (f"up to {_LISTED_MAX}",)
            raise InvalidRequest(f"{name} has {len(value)} elements", field=name, value=len(value), allowed=allowed)


def _read(name: str, field: Any, value: Any) -> Any:
    try:
        read = _scalar(field, value)
        field.containing_type._concrete_class(**{field.name: [read] if field.is_repeated else read})
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name} is {_shown(value)}: {error}", field=name, value=_shown(value)) from None
    return read


def _scalar(field: Any, value: Any) -> Any:
    """Converts the value to the field's type. Numbers may be text, because KServe's parameters have no fractions."""
    if field.cpp_type == field.CPPTYPE_STRING:
        if not isinstance(value, str):
            raise TypeError("it must be text")
        return value
    if field.cpp_type == field.CPPTYPE_BOOL:
        return _boolean(field.name, value)
    if isinstance(value, bool):
        raise TypeError("it must be a number")
    if field.cpp_type == field.CPPTYPE_DOUBLE:
        return float(value)
    if isinstance(value, float) and not value.is_integer():
        raise TypeError("it must be an integer")
    return int(value)


def _shown(value: Any) -> str:
    """Returns a short description of a value for an error. Takes constant time even for a long list."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value)


def _boolean(name: str, value: Any) -> bool:
    given = _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(given, bool):
        return given
    raise InvalidRequest(f"{name} is {_shown(value)}", field=name, value=_shown(value), allowed=("true", "false"))
