"""Reads input tensors of Open Inference requests, and writes output tensors of responses. Pure.

A tensor's elements are in its `contents`, or as raw bytes in a separate list. A response uses the form of its request.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.protos.inference import open_inference_pb2 as oip

_LENGTH_BYTES = 4  # length prefix of each element of type BYTES


@dataclass(frozen=True)
class OutputTensors:
    """An output tensor with one element: text, or a number of type UINT32."""

    name: str
    value: str | int

    @property
    def datatype(self) -> str:
        return "BYTES" if isinstance(self.value, str) else "UINT32"


def read_inputs(request: oip.ModelInferRequest, datatypes: dict[str, str]) -> dict[str, Any]:
    """Returns the single element of each input, as bytes or a boolean.

    Args:
        datatypes: the known inputs, each BYTES or BOOL.

    Raises:
        InvalidRequest: an input is unknown, has another type or several elements, or its bytes do not fit its shape.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        allowed = (f"{len(request.inputs)} entries, one for each input",)
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} entries", field="raw_input_contents", value=len(raw), allowed=allowed
        )
    values: dict[str, Any] = {}
    for index, tensor in enumerate(request.inputs):
        _check_tensor(tensor, datatypes)
        if tensor.name in values:
            raise InvalidRequest(f"input {tensor.name} is given twice", field=f"inputs.{tensor.name}")
        values[tensor.name] = _element(tensor, raw[index] if raw else None)
    return values


def write_outputs(response: oip.ModelInferResponse, outputs: Sequence[OutputTensors], *, raw: bool) -> None:
    """Adds the outputs, each of shape [1]."""
    for output in outputs:
        tensor = response.outputs.add(name=output.name, datatype=output.datatype, shape=[1])
        if isinstance(output.value, int):
            if raw:
                response.raw_output_contents.append(struct.pack("<I", output.value))
            else:
                tensor.contents.uint_contents.append(output.value)
            continue
        text = output.value.encode()
        if raw:
            response.raw_output_contents.append(struct.pack("<I", len(text)) + text)
        else:
            tensor.contents.bytes_contents.append(text)


def _check_tensor(tensor: oip.ModelInferRequest.InferInputTensor, datatypes: dict[str, str]) -> None:
    field = f"inputs.{tensor.name}"
    if tensor.name not in datatypes:
        raise InvalidRequest(
            f"there is no input {tensor.name!r}", field="inputs", value=tensor.name, allowed=tuple(datatypes)
        )
    wanted = datatypes[tensor.name]
    if tensor.datatype != wanted:
        raise InvalidRequest(
            f"{field} has datatype {tensor.datatype!r}", field=field, value=tensor.datatype, allowed=(wanted,)
        )
    shape = list(tensor.shape[:3])
    if shape not in ([1], [1, 1], []):
        cure = "send one request for each prompt; they run at the same time"
        raise InvalidRequest(
            f"{field} has shape {shape}", field=field, value=shape, allowed=("[1]", "[1, 1]"), cure=cure
        )


def _element(tensor: oip.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bytes | bool:
    field = f"inputs.{tensor.name}"
    if tensor.datatype == "BOOL":
        given = tensor.contents.bool_contents if raw is None else raw
        if len(given) == 1:
            return bool(given[0])
        raise InvalidRequest(f"{field} has {len(given)} elements", field=field, value=len(given), allowed=("1",))
    if raw is None:
        elements = tensor.contents.bytes_contents
        if len(elements) == 1:
            return elements[0]
        raise InvalidRequest(f"{field} has {len(elements)} elements", field=field, value=len(elements), allowed=("1",))
    if len(raw) < _LENGTH_BYTES or len(raw) - _LENGTH_BYTES != struct.unpack_from("<I", raw)[0]:
        cure = "send the element's length as 4 bytes, little-endian, and then its bytes"
        raise InvalidRequest(f"the raw bytes of {field} are not one element", field=field, cure=cure)
    return raw[_LENGTH_BYTES:]
