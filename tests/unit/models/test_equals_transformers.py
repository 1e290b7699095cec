"""Logits over the paged cache equal transformers' in fp32, for every family and every split of the prompt."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import Tensor

from baton.models.families.reader import read_config
from baton.models.families.table import FAMILIES
from baton.models.layers.causal_lm import CausalLM
from baton.models.loading.loader import load_model
from tests.unit.models import tiny_gemma
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.tiny import TINY, VOCAB_SIZE, architecture_of, save_tiny

PROMPT_TOKENS, DECODED_TOKENS = 30, 5


class Pair:
    """A tiny model twice: transformers' and ours."""

    def __init__(self, name: str, directory: Path) -> None:
        self.reference = save_tiny(name, directory)
        config = read_config(directory)
        self.backend = backend_for(config)
        self.model = load_model(directory, config, backend=self.backend, dtype="float32", device="cpu")

    def driver(self) -> PagedDriver:
        return PagedDriver(self.model, self.backend)

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return logits


@pytest.fixture(scope="module", params=TINY)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("tiny"))


def tokens_of(seed: int, count: int) -> list[int]:
    drawn: list[int] = torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    assert float(expected.std()) > 0.1, "a reference without spread proves nothing"
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def in_pieces(driver: PagedDriver, tokens: list[int], piece: Callable[[int], int]) -> Tensor:
    logits, start = [], 0
    while start < len(tokens):
        stop = min(start + piece(start), len(tokens))
        logits.append(driver.step({"r": tokens[start:stop]})["r"])
        start = stop
    return torch.cat(logits)


def test_logits_of_a_whole_prompt_are_equal(pair: Pair) -> None:
    tokens = tokens_of(0, PROMPT_TOKENS)
    assert_equal(pair.driver().step({"r": tokens})["r"], pair.expected(tokens))


def test_chunked_prompt_then_one_token_at_a_time(pair: Pair) -> None:
    tokens = tokens_of(1, PROMPT_TOKENS + DECODED_TOKENS)
    ours = in_pieces(pair.driver(), tokens, lambda start: 7 if start < PROMPT_TOKENS else 1)
    assert_equal(ours, pair.expected(tokens))


def test_every_token_alone(pair: Pair) -> None:
    tokens = tokens_of(2, 18)
    assert_equal(in_pieces(pair.driver(), tokens, lambda _: 1), pair.expected(tokens))


def test_mixed_batch_of_decodes_chunks_and_whole_prompts(pair: Pair) -> None:
    driver = pair.driver()
    tokens = {name: tokens_of(seed, 24) for seed, name in enumerate("abcd")}
    driver.step({"a": tokens["a"][:20], "b": tokens["b"][:9], "c": tokens["c"][:11]})
    logits = driver.step(
        {"a": tokens["a"][20:21], "b": tokens["b"][9:10], "c": tokens["c"][11:20], "d": tokens["d"][:15]}
    )
    for name, computed in (("a", 21), ("b", 10), ("c", 20), ("d", 15)):
        expected = pair.expected(tokens[name][:computed])
        assert_equal(logits[name], expected[computed - len(logits[name]) :])


def test_logits_are_float32_for_the_rows_asked_for(pair: Pair) -> None:
    hidden = torch.randn(3, pair.model.config.hidden_size)
    logits = pair.model.compute_logits(hidden[1:2])
    assert logits.shape == (1, VOCAB_SIZE)
    assert logits.dtype is torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "deepseek-v2-q-lora-groups-yarn",
        "gemma3",
        "llama4",
        "gpt-oss",
        "bloom",
        "qwen2-moe",
        "apertus",
        "ministral3",
        "granite-hybrid",
        "nemotron-h-latent-experts",
        "longcat",
        "falcon-h1",
        "mimo-v2-flash-groups-dense-between",
    ],
)
def test_half_precision_comes_near(name: str, dtype: str, tmp_path: Path) -> None:
    reference, config = save_tiny(name, tmp_path), read_config(tmp_path)
    backend = backend_for(config, dtype)
    model = load_model(tmp_path, config, backend=backend, dtype=dtype, device="cpu")
    tokens = tokens_of(3, 12)
    ours = PagedDriver(model, backend, dtype).step({"r": tokens})["r"]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert torch.nn.functional.cosine_similarity(ours, expected).min() > 0.98


def test_every_family_is_covered() -> None:
    that_also_see = {"Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"}  # in test_loader
    that_also_see |= {"Mistral3ForConditionalGeneration"}  # in test_dense_families
    that_also_see |= {f"Qwen{number}VLForConditionalGeneration" for number in ("2", "2_5_", "3")}  # in test_qwen_vl
    that_also_see |= {f"Qwen3_5{kind}ForConditionalGeneration" for kind in ("", "Moe")}  # in test_qwen_vl
    that_also_see |= {"Qwen3VLMoeForConditionalGeneration"}
    that_also_see |= tiny_gemma.ALSO_SEE  # in test_gemma_configs
    that_also_see |= {"KimiK25ForConditionalGeneration"}  # in test_moe_checkpoints
    not_in_transformers = {"Phi3SmallForCausalLM", "MiMoForCausalLM"}  # in test_phi3_small, test_mtp
    published_names = {"MPTForCausalLM", "PhiMoEForCausalLM", "ExaoneMoEForCausalLM"}  # which transformers has changed
    expected = (
        {architecture_of(family) for family, _ in TINY.values()} | that_also_see | not_in_transformers | published_names
    )
    assert expected == set(FAMILIES)


def test_every_row_of_the_table_names_a_model_class() -> None:
    for architecture, family in FAMILIES.items():
        assert issubclass(resolve_name(family.model), CausalLM), architecture
