"""POST /v1/embeddings, as OpenAI's."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from baton.gateway.http.bodies import Text, TokenIds, prompt_shape
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import Items, by_shape, tag
from baton.gateway.http.pooling import PoolingBody, add_report, json_answer, pooled
from baton.gateway.text.pooled_texts import EmbeddedTexts, Input
from baton.gateway.text.pooled_values import check_dimensions, finished

INPUTS_MAX = 2048  # as OpenAI's
_BYTES_PER_TOKEN = 8  # estimated size of one token id

Inputs = Annotated[
    Annotated[Text, tag("text")]
    | Annotated[Items[Text], Field(min_length=1, max_length=INPUTS_MAX), tag("texts")]
    | Annotated[TokenIds, tag("ids")]
    | Annotated[Items[TokenIds], Field(max_length=INPUTS_MAX), tag("lists")],
    by_shape(prompt_shape, "a string, token ids, or a list of either"),
]


class EmbeddingsBody(PoolingBody):
    """POST /v1/embeddings"""

    input: Inputs
    dimensions: int | None = Field(
        None, ge=1, lt=1 << 20, description="length of the vectors, cut from the model's and normalized again"
    )
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32")
    prompt_name: str | None = Field(
        None, description="the checkpoint's prompt that goes before each text; default: the checkpoint's default"
    )

    @property
    def inputs(self) -> Sequence[Input]:
        """The inputs, each as text or as token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input


async def embeddings(call: HttpCall) -> Response:
    body = await call.read(EmbeddingsBody)
    serving = call.serving
    serving.check_name(body.model)
    salt = body.cache_salt or ""
    texts = EmbeddedTexts(
        serving.model,
        max_context_tokens=call.context.fleet.max_context_tokens,
        salt=salt,
        truncate_to=body.truncate_prompt_tokens,
    )
    config = serving.model.embedding
    assert config is not None, "EmbeddedTexts has checked it"
    check_dimensions(body.dimensions, config, serving.model.hidden_size)
    if body.dimensions not in (None, serving.model.hidden_size) and not config.matryoshka:
        call.warn("dimensions: the checkpoint does not say that its vectors may be cut; shorter ones may be worse")
    before = texts.check_prompt_name(body.prompt_name)
    inputs = body.inputs
    size_bytes = sum(len(each) if isinstance(each, str) else _BYTES_PER_TOKEN * len(each) for each in inputs)
    answer = await pooled(call, body, size_bytes, lambda: texts.prompts(inputs, before=before))

    def whole() -> dict[str, Any]:
        vectors = finished(answer.vectors, config, body.dimensions)
        data = [
            {"object": "embedding", "index": index, "embedding": written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        given = {"object": "list", "data": data, "model": body.model or serving.model.name}
        return add_report(call, body, answer, given)

    return await json_answer(whole)


def written(vector: NDArray[np.float32], encoding_format: str) -> NDArray[np.float32] | str:
    if encoding_format == "float":
        return np.ascontiguousarray(vector)
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
