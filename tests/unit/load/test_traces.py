"""Reading traces: every known form gives the same requests, and a wrong line is named."""

import json
import lzma
from pathlib import Path

import pytest

from baton.core.errors import InvalidRequest
from baton.load.traces import TraceRequest, read_trace, write_trace

MOONCAKE = [
    {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 1000, "input_length": 512, "output_length": 9, "hash_ids": [0]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.9000000,374,44\r\n2023-11-17 00:00:00.4000000,6,1"
)


def mooncake() -> str:
    return "\n".join(map(json.dumps, MOONCAKE))


def test_mooncake_lines_are_ordered_by_time_and_start_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake())
    assert read_trace(path) == [
        TraceRequest(0.0, 512, 9, (0,), 512),
        TraceRequest(0.5, 600, 5, (0, 7), 512),
    ]


def test_azure_times_have_seven_decimals_and_may_pass_midnight(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(0.5)


def test_a_compressed_trace_reads_as_the_plain_one(tmp_path: Path) -> None:
    plain, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.xz"
    plain.write_text(mooncake())
    packed.write_bytes(lzma.compress(mooncake().encode()))
    assert read_trace(packed) == read_trace(plain)


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    requests = [TraceRequest(0.0, 10, 2), TraceRequest(0.25, 40, 3, (1, 2, 3), 16)]
    write_trace(tmp_path / "own.jsonl", requests)
    assert read_trace(tmp_path / "own.jsonl") == requests


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "starts with ''"),
        ("a,b,c\n1,2,3\n", "starts with 'a,b,c'"),
        ('{"timestamp": 1, "input_length": 3}', "request 1 of .*no 'output_length'"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 3}', "request 1 of .*0 tokens in"),
        ('{"at_s": 1, "prompt_tokens": 3, "output_tokens": 3, "prefix_ids": [1]}', "0 tokens each"),
        ('{"at_s": 0, "prompt_tokens": 3, "output_tokens": 3}\n{"at_s"', "request 2 of"),
        (AZURE.replace("374", "many"), "request 1 of .*many"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=words):
        read_trace(path)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    damaged = tmp_path / "damaged.jsonl.xz"
    damaged.write_bytes(lzma.compress(mooncake().encode())[:40])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(damaged)
