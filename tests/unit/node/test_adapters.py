"""A watched directory of adapters: what is loaded from it, and when."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, InvalidRequest
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.node.adapters import Adapters, need_room_for_experts
from baton.settings.node_config import NodeSettings
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import EventRecorder
from tests.unit.models.lora import save_adapter
from tests.unit.models.tiny import save_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("base")
    save_tiny("llama", directory)
    return directory


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    (tmp_path / "watched").mkdir()
    return tmp_path / "watched"


def built_with(base: Path, watched: Path, *, slots: int) -> tuple[BuiltRunner, NodeSettings]:
    settings = NodeSettings(
        model=base, num_blocks=16, block_size=4, device="cpu", max_adapters=slots, adapter=str(watched)
    )
    return build_runner(settings), settings


@asynccontextmanager
async def watching(base: Path, watched: Path, *, slots: int = 4) -> AsyncIterator[tuple[Adapters, Engine]]:
    """Started; the test looks when it wants."""
    built, settings = built_with(base, watched, slots=slots)
    on_step = EventRecorder()
    async with Engine(built.runner, limits(), on_step=on_step, grammars=built.grammars, num_adapters=slots) as engine:
        adapters = Adapters(settings, engine, built.runner.adapters, model_name="base")
        await adapters.start()
        yield adapters, engine


def names(engine: Engine) -> list[str]:
    return [adapter.name for adapter in engine.adapters.loaded]


async def test_what_is_there_at_the_start_is_loaded_at_once_and_unloaded_when_it_is_gone(
    base: Path, watched: Path
) -> None:
    save_adapter(base, watched / "a", seed=1)
    async with watching(base, watched) as (adapters, engine):
        assert names(engine) == ["a"]
        shutil.rmtree(watched / "a")
        await adapters.scan(watched)
        assert names(engine) == []


async def test_files_that_still_change_are_not_loaded(base: Path, watched: Path) -> None:
    """Old weights with a new config would be an adapter that nobody trained."""
    save_adapter(base, watched / "a", seed=1)
    async with watching(base, watched) as (adapters, engine):
        before = engine.adapters.loaded
        save_adapter(base, watched.parent / "next", seed=2, lora_alpha=3)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(watched.parent / "next" / file, watched / "a" / file)
            await adapters.scan(watched)
            assert engine.adapters.loaded == before
        await adapters.scan(watched)
        assert names(engine) == ["a"]
        assert engine.adapters.loaded != before


async def test_an_adapter_without_a_slot_is_loaded_when_one_is_free(base: Path, watched: Path) -> None:
    save_adapter(base, watched / "a", seed=1)
    save_adapter(base, watched / "b", seed=2)
    async with watching(base, watched, slots=1) as (adapters, engine):
        await adapters.scan(watched)
        assert names(engine) == ["a"]
        shutil.rmtree(watched / "a")
        await adapters.scan(watched)
        assert names(engine) == ["b"]


async def test_hidden_directories_are_left_out(base: Path, watched: Path) -> None:
    save_adapter(base, watched / ".a.part", seed=1)
    async with watching(base, watched) as (adapters, engine):
        await adapters.scan(watched)
        assert names(engine) == []
        (watched / ".a.part").rename(watched / "a")
        await adapters.scan(watched)
        await adapters.scan(watched)
        assert names(engine) == ["a"]


async def test_an_adapter_with_the_name_of_the_model_is_refused(base: Path, watched: Path, tmp_path: Path) -> None:
    """Clients that ask for it would get the model."""
    save_adapter(base, tmp_path / "sql", seed=1)
    async with watching(base, watched) as (adapters, _):
        with pytest.raises(InvalidRequest, match="the adapter base has the model's name"):
            await adapters.load("base", tmp_path / "sql")


async def test_a_directory_without_an_adapter_is_named_with_a_cure(base: Path, watched: Path, tmp_path: Path) -> None:
    async with watching(base, watched) as (adapters, _):
        with pytest.raises(InvalidRequest) as caught:
            await adapters.load("sql", tmp_path / "none")
    assert (
        str(caught.value)
        == f"{tmp_path / 'none'} has no adapter_config.json; give the directory of an adapter as PEFT saves it"
    )


def test_a_node_has_room_for_experts_if_an_adapter_that_it_finds_changes_them(watched: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    save_tiny("qwen3-moe", mixture)
    of_attention = save_adapter(mixture, tmp_path / "attention", seed=1, targets=("o_proj",))
    of_experts = save_adapter(mixture, tmp_path / "experts", seed=1, targets=("o_proj", "up_proj"))

    def found(*adapters: str) -> bool:
        return need_room_for_experts(NodeSettings(model=mixture, adapter=",".join(adapters)))

    assert not found()
    assert not found(f"a={of_attention}", str(watched))
    assert found(f"a={of_attention}", f"b={of_experts}")
    shutil.copytree(of_experts, watched / "b")
    assert found(str(watched))
    (watched / "b" / "adapter_model.safetensors").write_bytes(b"damaged")
    assert not found(str(watched))


async def test_a_directory_that_is_not_there_is_an_error_at_the_start(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is not a directory"):
        async with watching(base, tmp_path / "nowhere"):
            pass
