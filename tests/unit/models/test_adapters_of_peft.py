"""Adapters that PEFT makes and saves give PEFT's tokens here, or are refused by name."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers
from peft import LoraConfig

from baton.core.errors import ConfigError
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.engine.request import EngineRequest
from baton.models.adapters.adapter import read_adapter
from baton.settings.node_config import NodeSettings
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import BLOCK_SIZE, EventRecorder, greedy, prompt_of, transformers_greedy
from tests.unit.models.tiny import save_tiny

pytestmark = [  # PEFT calls what transformers will remove, and warns about how an adapter may be used later
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
TOKENS, MAX_RANK = 10, 16
PROMPT = prompt_of(17)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Config = Callable[..., Any]

SERVED: Mapping[str, Config] = MappingProxyType(
    {
        "a list of layers": partial(LoraConfig, r=4, lora_alpha=12, target_modules=ALL),
        "a regular expression": partial(LoraConfig, r=3, target_modules=r".*layers\.1\.(self_attn\.[qv]|mlp\.up)_proj"),
        "all linear layers": partial(LoraConfig, r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        "by the square root of the rank": partial(LoraConfig, r=9, target_modules=ALL, use_rslora=True),
        "ranks and alphas by layer": partial(
            LoraConfig,
            r=4,
            lora_alpha=8,
            target_modules=ALL,
            rank_pattern={"q_proj": 7, r"layers\.1\.mlp\..*": 2},
            alpha_pattern={"v_proj": 21, r"^model\.layers\.0\.mlp\.down_proj": 3},
        ),
        "ranks by layer and their square roots": partial(
            LoraConfig, r=4, target_modules=ALL, use_rslora=True, rank_pattern={"o_proj": 16}
        ),
        "some layers": partial(LoraConfig, r=4, target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
        "all but some": partial(LoraConfig, r=4, target_modules="all-linear", exclude_modules=["o_proj", "up_proj"]),
        "with dropout": partial(LoraConfig, r=4, target_modules=ALL, lora_dropout=0.5, init_lora_weights="gaussian"),
    }
)
# The field that the refusal names.
REFUSED: Mapping[str, tuple[str, Config]] = MappingProxyType(
    {
        "DoRA": ("use_dora", partial(LoraConfig, target_modules=ALL, use_dora=True)),
        "whole modules": ("modules_to_save", partial(LoraConfig, target_modules=ALL, modules_to_save=["lm_head"])),
        "biases": ("bias", partial(LoraConfig, target_modules=ALL, bias="lora_only")),
        "biases of its own": ("lora_bias", partial(LoraConfig, target_modules=ALL, lora_bias=True)),
        "tokens": ("trainable_token_indices", partial(LoraConfig, target_modules=ALL, trainable_token_indices=[1])),
        "other bases": ("init_lora_weights", partial(LoraConfig, target_modules=ALL, init_lora_weights="olora")),
        "replicated layers": ("layer_replication", partial(LoraConfig, target_modules=ALL, layer_replication=[(0, 2)])),
        "the embedding": ("adapter", partial(LoraConfig, target_modules=["embed_tokens"])),
        "the head": ("adapter", partial(LoraConfig, target_modules=["lm_head", "q_proj"])),
        "another method": ("peft_type", partial(peft.IA3Config, target_modules=ALL, feedforward_modules=["down_proj"])),
        "too large a rank": ("max_adapter_rank", partial(LoraConfig, r=17, target_modules=ALL)),
    }
)


class Base(NamedTuple):
    directory: Path
    built: BuiltRunner


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    directory = tmp_path_factory.mktemp("base")
    save_tiny("llama", directory)
    return Base(directory, build(directory))


def build(directory: Path, **given: Any) -> BuiltRunner:
    settings = {"model": directory, "num_blocks": 64, "block_size": BLOCK_SIZE, "device": "cpu", **given}
    return build_runner(NodeSettings.model_validate({**settings, "max_adapters": 1, "max_adapter_rank": MAX_RANK}))


def save(directory: Path, config: Any, adapter: Path) -> Any:
    """Saves an adapter of random numbers; returns PEFT's model with it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    made = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.3)
    made.save_pretrained(adapter)
    return made


async def answer(built: BuiltRunner, adapter: Path) -> list[int]:
    events = EventRecorder()
    assert built.runner.adapters is not None
    async with Engine(built.runner, limits(), on_step=events, grammars=built.grammars, num_adapters=1) as engine:
        read = read_adapter(adapter, built.runner.adapters.layers, max_rank=MAX_RANK)
        loaded = await engine.load_adapter("a", read)
        engine.submit(EngineRequest("r", PROMPT, greedy(TOKENS), adapter=loaded))
        await events.finished("r")
    return events.ids("r")


@pytest.mark.parametrize("name", SERVED)
async def test_tokens_are_those_of_peft(name: str, base: Base, tmp_path: Path) -> None:
    made = save(base.directory, SERVED[name](), tmp_path)
    expected = transformers_greedy(made, PROMPT, TOKENS)
    with made.disable_adapter():
        assert expected != transformers_greedy(made, PROMPT, TOKENS), "an adapter that changes nothing"
    assert await answer(base.built, tmp_path) == expected


async def test_layers_with_their_inputs_first_are_loaded(tmp_path: Path) -> None:
    """GPT-2's, which PEFT calls `fan_in_fan_out`."""
    save_tiny("gpt2", tmp_path / "base")
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    made = save(tmp_path / "base", config, tmp_path / "adapter")
    expected = transformers_greedy(made, PROMPT, TOKENS)
    assert await answer(build(tmp_path / "base"), tmp_path / "adapter") == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, base: Base, tmp_path: Path) -> None:
    field, config = REFUSED[name]
    save(base.directory, config(), tmp_path)
    assert base.built.runner.adapters is not None
    with pytest.raises(ConfigError) as refused:
        read_adapter(tmp_path, base.built.runner.adapters.layers, max_rank=MAX_RANK)
    assert refused.value.field == field
