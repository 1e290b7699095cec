"""Log lines: one record a line in either format, with time and zone, role, name and request id."""

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.logs import JsonLines, TextLines, enter_request, for_request, set_up_logging, show_name

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
FORGED = "p\n2026-11-23T03:14:15.000+00:00 decode_node d INFO drained\r\x1b[2J\u2028\x85\x00"


def logged(formatter: logging.Formatter, message: str, *args: object, **more: Any) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info(message, *args, **more)
    return stream.getvalue().splitlines()


def as_text(message: str, *args: object, **more: Any) -> list[str]:
    return logged(TextLines("decode_node", "decode-0"), message, *args, **more)


def as_json(message: str, *args: object, **more: Any) -> dict[str, Any]:
    (line,) = logged(JsonLines("decode_node", "decode-0"), message, *args, **more)
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    logger = logging.getLogger()
    handlers, level, ours = logger.handlers[:], logger.level, logging.getLogger("baton").level
    yield logger
    logger.handlers[:], logger.level = handlers, level
    for name in ("attention", "baton", "decode_node", "kvtransfer", "prefill_node"):
        logging.getLogger(name).setLevel(ours)


def test_a_line_has_date_zone_role_name_and_level() -> None:
    (line,) = as_text("paired with %s", "prefill-0")
    assert re.fullmatch(rf"{TIME} decode_node decode-0 INFO paired with prefill-0", line)


def test_a_json_record_has_the_same() -> None:
    record = as_json("paired with %s", "prefill-0")
    assert re.fullmatch(TIME, record.pop("time"))
    message = "paired with prefill-0"
    assert record == {"level": "info", "role": "decode_node", "name": "decode-0", "message": message}


def test_figures_follow_the_message() -> None:
    more = {"fields": {"total_s": 1.23456789, "path": "remote", "why": 'a "b" c', "none": ""}}
    (line,) = as_text("request", extra=more)
    assert line.endswith(r'INFO request total_s=1.23457 path=remote why="a \"b\" c" none=""')
    assert as_json("request", extra=more)["total_s"] == 1.23456789


def test_no_figure_changes_what_the_process_says_of_itself() -> None:
    record = as_json("request", extra={"fields": {"role": "gateway", "level": "x", "message": "y"}})
    assert (record["role"], record["level"], record["message"]) == ("decode_node", "info", "request")


async def test_what_a_task_logs_has_the_id_of_its_request() -> None:
    async def serve(request_id: str) -> tuple[list[str], dict[str, Any]]:
        enter_request(request_id)
        await asyncio.sleep(0)
        return as_text("failed"), await asyncio.create_task(later())

    async def later() -> dict[str, Any]:
        return as_json("failed")

    for request_id, (lines, record) in zip("ab", await asyncio.gather(serve("a"), serve("b")), strict=True):
        assert lines[0].endswith(f"INFO failed request_id={request_id}")
        assert record["request_id"] == request_id
    assert "request_id" not in as_json("failed")


def test_a_given_request_id_wins() -> None:
    with for_request("outer"):
        assert as_json("failed", extra={"fields": {"request_id": "given"}})["request_id"] == "given"
        assert as_json("failed")["request_id"] == "outer"


def test_nothing_that_others_named_forges_a_line() -> None:
    escaped = r"p\n2026-11-23T03:14:15.000+00:00 decode_node d INFO drained\r\x1b[2J\u2028\x85\x00"
    (line,) = as_text("lost %s", FORGED)
    assert line.endswith(f"INFO lost {escaped}")
    (line,) = as_text("lost", extra={"fields": {"request_id": FORGED}})
    assert "drained" in line
    (line,) = logged(TextLines("decode_node", FORGED), "lost")
    assert "drained" in line
    assert as_json("lost %s", FORGED)["message"] == f"lost {FORGED}"
    (line,) = as_text("plain: Zürich, 東京")
    assert line.endswith("plain: Zürich, 東京")


def test_a_path_that_is_no_utf_8_is_shown_by_its_bytes() -> None:
    path = Path(os.fsdecode(b"caf\xe9"))
    (line,) = as_text("lost %s", path, extra={"fields": {"path": path}})
    assert line.endswith(r'lost caf\xe9 path="caf\\xe9"')
    record = as_json("lost %s", path, extra={"fields": {"path": path, "name": str(path)}, "lines": str(path)})
    found = (record["message"], record["path"], record["lines"])
    assert found == (r"lost caf\xe9", r"caf\xe9", [r"caf\xe9"])


def test_lines_of_an_error_follow_indented_or_in_a_list() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        first, *rest = as_text("a call failed", exc_info=error)
        record = as_json("a call failed", exc_info=error)
    assert first.endswith("INFO a call failed")
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)
    assert record["lines"][0] == "Traceback (most recent call last):"
    assert as_text("stuck:", extra={"lines": "one\ntwo"})[1:] == ["    one", "    two"]
    assert as_json("stuck:", extra={"lines": "one\ntwo"})["lines"] == ["one", "two"]


def test_others_loggers_speak_only_of_what_is_wrong(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("debug", role="gateway", form="json")
    logging.getLogger("asyncio").info("a selector")
    logging.getLogger("baton.node.progress").debug("ours")
    show_name("gateway@127.0.0.1:7000")
    logging.getLogger("baton.access").info("named")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["message"], line["name"]) for line in lines] == [("ours", ""), ("named", "gateway@127.0.0.1:7000")]


def test_the_level_is_that_of_our_own_records(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("error", role="gateway")
    logging.getLogger("baton").warning("hidden")
    logging.getLogger("baton").error("shown")
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == ["shown"]


def test_grpc_writes_no_lines_of_its_own() -> None:
    program = (
        "from baton.settings.environment import quiet_grpc; quiet_grpc()\n"
        "import grpc, socket\n"
        "taken = socket.create_server(('127.0.0.1', 0))\n"
        "server = grpc.server(None, options=[('grpc.so_reuseport', 0)])\n"
        "try: server.add_insecure_port('127.0.0.1:%d' % taken.getsockname()[1])\n"
        "except RuntimeError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("refused\n", "")
