"""Prints what sentence-transformers computes for texts and pairs, as JSON.

Runs in the environment `sentence_transformers` of `.clients`, which sees torch and transformers of the project and
nothing of ours. Reads a list of `{"directory", "texts", "prompt_name", "query"}`; those with a query are pairs.
"""

import json
import sys
from typing import Any

from sentence_transformers import CrossEncoder, SentenceTransformer


def computed(directory: str, texts: list[str], prompt_name: str | None, query: str | None) -> Any:
    """One vector for each text, or one score for each pair."""
    if query is not None:
        return CrossEncoder(directory, device="cpu").predict([(query, text) for text in texts]).tolist()
    return SentenceTransformer(directory, device="cpu").encode(texts, prompt_name=prompt_name).tolist()


if __name__ == "__main__":
    print(json.dumps([computed(**asked) for asked in json.load(sys.stdin)]))
