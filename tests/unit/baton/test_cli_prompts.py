"""The file of prompts of `baton generate --file`."""

from pathlib import Path

import pytest
import typer

from baton.cli.prompts import PromptRecord, read_records


def read(tmp_path: Path, text: str, name: str = "prompts.txt") -> list[PromptRecord]:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return read_records(file)


def test_each_line_of_text_is_a_prompt_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    assert read(tmp_path, "one\n\n two \r\n") == [PromptRecord(0, "one"), PromptRecord(1, " two ")]


def test_a_file_with_a_line_that_is_not_json_is_text(tmp_path: Path) -> None:
    assert read(tmp_path, '"quoted"\n{not json\n42\n') == [
        PromptRecord(0, '"quoted"'),
        PromptRecord(1, "{not json"),
        PromptRecord(2, "42"),
    ]


def test_json_lines_are_strings_or_objects_and_keep_line_breaks(tmp_path: Path) -> None:
    text = '"two\\nlines\u2028more"\n{"prompt": "x", "id": "a"}\n{"prompt": [1, 2]}\n'
    assert read(tmp_path, text) == [
        PromptRecord(0, "two\nlines\u2028more"),
        PromptRecord(1, "x", "a"),
        PromptRecord(2, [1, 2]),
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("plain", "neither a JSON string nor an object"),
        ('{"text": "x"}', "'text'"),
        ('{"prompt": "x", "max_tokens": 3}', "'max_tokens'"),
        ('{"prompt": [1, -2]}', "no prompt"),
        ('{"prompt": [true]}', "no prompt"),
        ("{}", "no prompt"),
    ],
)
def test_a_wrong_line_of_json_lines_is_named(tmp_path: Path, line: str, named: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        read(tmp_path, f'"fine"\n\n{line}\n', "prompts.jsonl")
    assert "line 3 of " in str(refused.value)
    assert named in str(refused.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no prompts"):
        read(tmp_path, "\n \n")
