"""What a checkpoint's files say about generating."""

import json
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.core.sampling import SamplingParams
from baton.gateway.text.model import read_bos_token_id, read_default_sampling


def directory(path: Path, *, generation: object = None, config: object = None) -> Path:
    (path / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_the_numbers_of_the_file_are_defaults(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": False, "max_length": 7, "min_p": None}
    defaults = read_default_sampling(directory(tmp_path, generation=given))
    assert defaults == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)


def test_a_checkpoint_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert read_default_sampling(directory(tmp_path)) == SamplingParams()


def test_top_k_of_minus_one_is_off(tmp_path: Path) -> None:
    assert read_default_sampling(directory(tmp_path, generation={"top_k": -1})).top_k == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": True},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
)
def test_a_wrong_number_names_file_and_field(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="generation_config") as raised:
        read_default_sampling(directory(tmp_path, generation=wrong))
    assert next(iter(wrong)) in str(raised.value)


def test_what_a_request_gives_counts_even_when_it_is_zero() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.9)
    merged = SamplingParams(temperature=0.0, top_k=0, stop=["x"]).over(defaults)
    assert merged == SamplingParams(temperature=0.0, top_k=0, top_p=0.9, stop=["x"])
    assert defaults.temperature == 0.6


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, None),
        (None, {"bos_token_id": 1}, 1),
        ({"bos_token_id": 2}, {"bos_token_id": 1}, 2),
        ({}, {"text_config": {"bos_token_id": 5}}, 5),
        (None, {"bos_token_id": 0}, 0),
    ],
)
def test_the_token_at_the_beginning_is_read(
    tmp_path: Path, generation: object, config: object, expected: int | None
) -> None:
    assert read_bos_token_id(directory(tmp_path, generation=generation, config=config)) == expected
