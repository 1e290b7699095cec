"""What `baton up` shows a person of its processes' logs."""

import json
from collections.abc import Mapping

import pytest

from baton.cli.cluster_log import HEADER, ClusterLog

RECORD = {
    "time": "2026-11-28T12:33:10.254+00:00", "level": "info", "role": "gateway", "name": "gateway@a", "message": "x",
}  # fmt: skip
REQUEST = RECORD | {
    "message": "request", "outcome": "finished", "client": "", "outputs": 1, "prompt_tokens": 41, "cached_tokens": 0,
    "completion_tokens": 21, "path": "remote", "prefill_node": "prefill-0", "decode_node": "decode-0", "ttft_s": 0.06,
    "bytes_sent": 251658, "transport": "sysv", "total_s": 0.26,
}  # fmt: skip


def shown(record: Mapping[str, object], *, verbose: bool = False) -> str:
    return ClusterLog(verbose=verbose).shown(json.dumps(record))


def test_a_request_is_a_row_with_where_it_ran_what_moved_and_its_latencies() -> None:
    cells = [cell.strip() for cell in shown(REQUEST).split("  ") if cell]
    assert cells == ["41", "prefill-0", "decode-0", "0.24 MiB, sysv", "60.0 ms", "10.0 ms", "21"]
    assert len(shown(REQUEST)) == len(HEADER) <= 80


def test_a_request_of_one_node_moved_nothing() -> None:
    row = shown(REQUEST | {"path": "local", "prefill_node": "", "bytes_sent": 0, "transport": "", "cached_tokens": 32})
    assert row.split() == ["41", "decode-0", "decode-0", "nothing", "60.0", "ms", "10.0", "ms", "21", "32", "cached"]


def test_a_split_prompt_names_the_node_of_its_rest() -> None:
    assert shown(REQUEST | {"path": "split"}).endswith("  rest prefilled on decode-0")


def test_a_request_of_one_token_has_no_tpot() -> None:
    assert shown(REQUEST | {"completion_tokens": 1}).split()[-2:] == ["-", "1"]


@pytest.mark.parametrize(("outcome", "line"), [("cancelled", "cancelled after 260 ms"), ("failed", "")])
def test_a_request_without_an_end_is_a_line_unless_a_warning_has_said_why(outcome: str, line: str) -> None:
    assert shown(RECORD | {"message": "request", "outcome": outcome, "total_s": 0.26}) == line


def test_warnings_and_errors_appear_and_other_records_only_if_verbose() -> None:
    warning = RECORD | {"level": "warning", "message": "lost decode-0", "peer": "decode 0", "after_s": 0.52}
    assert shown(warning) == '12:33:10 gateway@a WARNING lost decode-0 peer="decode 0" after_s=0.52'
    error = RECORD | {"level": "error", "name": "", "lines": ["Traceback", "  at \x1b[2J"]}
    assert shown(error) == "12:33:10 gateway ERROR x\n    Traceback\n      at \\x1b[2J"
    assert shown(RECORD) == ""
    assert shown(RECORD, verbose=True) == "12:33:10 gateway@a INFO x"


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "{1: 2}", '{"a": 1}', "{broken", '["level"]'])
def test_a_line_that_is_no_record_appears_as_it_is(line: str) -> None:
    assert ClusterLog().shown(line) == line


def test_names_that_others_chose_cannot_move_the_cursor() -> None:
    hostile = REQUEST | {"decode_node": "\x1b[2Jevil", "transport": "\x07"}
    assert shown(hostile).isprintable()
