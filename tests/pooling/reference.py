"""What sentence-transformers computes for a text or a pair, one at a time: one forward, pooling, normalization."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.pooling.checkpoints import tokenizer_of

_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def embed(
    model: Any, directory: Path, text: str | list[int], *, prompt: str = "", dimensions: int | None = None
) -> list[float]:
    """The vector of a text, by the checkpoint's own pooling files."""
    tokenizer = tokenizer_of(directory)
    token_ids = tokenizer.encode(prompt + text).ids if isinstance(text, str) else text
    config = json.loads((directory / "1_Pooling" / "config.json").read_text())
    with torch.no_grad():
        states_TD = model(torch.tensor([token_ids])).last_hidden_state[0].float()
    if config["pooling_mode_lasttoken"]:
        vector = states_TD[-1]
    elif config["pooling_mode_cls_token"]:
        vector = states_TD[0]
    else:
        skipped = len(tokenizer.encode(prompt).ids) - 1 if prompt and not config["include_prompt"] else 0
        vector = states_TD[skipped:].mean(dim=0)
    normalizes = "Normalize" in (directory / "modules.json").read_text()
    vector = vector[:dimensions]
    if normalizes:
        vector = torch.nn.functional.normalize(vector, dim=0)
    values: list[float] = vector.tolist()
    return values


def instruct_score(model: Any, directory: Path, query: str, document: str, *, instruction: str = _INSTRUCTION) -> float:
    """The probability of yes against no, as in the model card of Qwen3-Reranker."""
    tokenizer = tokenizer_of(directory)
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    token_ids = [token_id for part in (_BEFORE, body, _AFTER) for token_id in tokenizer.encode(part).ids]
    with torch.no_grad():
        logits_V = model(torch.tensor([token_ids])).logits[0, -1].float()
    both = logits_V[[tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]]
    return float(both.softmax(dim=0)[1])


def classifier_score(model: Any, directory: Path, query: str, document: str) -> float:
    token_ids = tokenizer_of(directory).encode(query, document).ids
    with torch.no_grad():
        logit = model(torch.tensor([token_ids[:]])).logits[0, 0].float()
    return float(logit.sigmoid())
