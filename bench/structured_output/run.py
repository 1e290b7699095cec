"""Structured output: the time of masks in llguidance, which Baton uses, and in XGrammar; what each refuses; and what 64
constrained rows add to a step. Both get the same tokenizer of 128,256 tokens.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.structured_output.masks import batches, masks, refusals
from bench.structured_output.steps import steps
from bench.structured_output.tokenizer import wide_tokenizer
from bench.table import Row

_VOCAB_SIZE = 128_256


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this benchmark. With a GPU steps are those of Llama 3.1 8B, else those of the demo model."""
    with TemporaryDirectory() as folder:
        progress("structured: makes a tokenizer")
        path = Path(folder) / "tokenizer.json"
        tokenizer = wide_tokenizer(_VOCAB_SIZE)
        tokenizer.save(str(path))
        progress("structured: masks")
        yield from masks(path, tokenizer, progress)
        yield from batches(path, tokenizer)
        if not torch.cuda.is_available():
            progress("structured: the JSON-Schema-Test-Suite")
            yield from refusals()
        progress("structured: steps")
        yield from steps(path, vocab_size=_VOCAB_SIZE)
