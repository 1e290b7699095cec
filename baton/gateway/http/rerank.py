"""POST /v1/rerank, as Jina's and Cohere's, and POST /v1/score, as vLLM's: how well documents answer a query."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from starlette.responses import Response

from baton.gateway.http.bodies import Text
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import TEXT_OR_LIST, TEXT_OR_OBJECT, Items, Model, tag
from baton.gateway.http.pooling import PoolingBody, add_report, json_answer, pooled
from baton.gateway.serving.pooling import PooledAnswer
from baton.gateway.text.pooled_texts import ScoredPairs
from baton.gateway.text.pooled_values import scores_of

DOCUMENTS_MAX = 2048


class Document(Model):
    """A document as an object."""

    text: Text


GivenDocument = Annotated[Annotated[Text, tag("text")] | Annotated[Document, tag("object")], TEXT_OR_OBJECT]
Texts = Annotated[
    Annotated[Text, tag("text")] | Annotated[Items[Text], Field(min_length=1, max_length=DOCUMENTS_MAX), tag("list")],
    TEXT_OR_LIST,
]


class ScoringBody(PoolingBody):
    """Fields of all requests for scores."""

    instruction: Text | None = Field(
        None, description="what makes a document relevant, for models whose template has it, such as Qwen3-Reranker"
    )


class RerankBody(ScoringBody):
    """POST /v1/rerank and POST /rerank"""

    query: Text
    documents: Annotated[Items[GivenDocument], Field(min_length=1, max_length=DOCUMENTS_MAX)]
    top_n: int | None = Field(None, ge=1, lt=1 << 32, description="number of best documents; default: all")
    return_documents: bool = Field(True, description="repeat the documents in the answer")

    @property
    def texts(self) -> Sequence[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreBody(ScoringBody):
    """POST /v1/score"""

    text_1: Texts = Field(description="one query, or one for each document")
    text_2: Texts = Field(description="the documents")

    @model_validator(mode="after")
    def _is_possible_score(self) -> "ScoreBody":
        if isinstance(self.text_1, list) and len(self.text_1) not in (1, len(self.documents)):
            raise ValueError("text_1 has neither one text nor as many as text_2")
        return self

    @property
    def documents(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2

    @property
    def queries(self) -> list[str]:
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        return queries * len(self.documents) if len(queries) == 1 else queries


async def rerank(call: HttpCall) -> Response:
    body = await call.read(RerankBody)
    texts = body.texts
    call.new_answer_id("rerank-")
    answer, scores = await _score(call, body, [(body.query, text) for text in texts], field="documents")

    def whole() -> dict[str, Any]:
        best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": float(scores[index])} for index in best]
        if body.return_documents:
            results = [each | {"document": {"text": texts[index]}} for each, index in zip(results, best, strict=True)]
        given = {"id": call.answer_id, "model": body.model or call.serving.model.name, "results": results}
        return add_report(call, body, answer, given)

    return await json_answer(whole)


async def score(call: HttpCall) -> Response:
    body = await call.read(ScoreBody)
    call.new_answer_id("score-")
    answer, scores = await _score(call, body, list(zip(body.queries, body.documents, strict=True)), field="text_2")

    def whole() -> dict[str, Any]:
        data = [{"object": "score", "index": index, "score": float(each)} for index, each in enumerate(scores)]
        given = {
            "id": call.answer_id,
            "object": "list",
            "created": int(time.time()),
            "model": body.model or call.serving.model.name,
            "data": data,
        }
        return add_report(call, body, answer, given)

    return await json_answer(whole)


async def _score(
    call: HttpCall, body: ScoringBody, pairs: Sequence[tuple[str, str]], *, field: str
) -> tuple[PooledAnswer, NDArray[np.float64]]:
    serving = call.serving
    serving.check_name(body.model)
    salt = body.cache_salt or ""
    scored = ScoredPairs(
        serving.model,
        max_context_tokens=call.context.fleet.max_context_tokens,
        salt=salt,
        truncate_to=body.truncate_prompt_tokens,
    )
    size_bytes = sum(len(query) + len(document) for query, document in pairs)
    tokenize = partial(scored.prompts, pairs, field=field, instruction=body.instruction or "")
    answer = await pooled(call, body, size_bytes, tokenize)
    config = serving.model.score
    assert config is not None, "ScoredPairs has checked it"
    return answer, scores_of(np.stack(answer.vectors).astype(np.float64), config)
