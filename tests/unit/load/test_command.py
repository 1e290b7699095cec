"""The flags of `baton bench`: every mistake is one line, before any load."""

import pytest

from baton.cli.program import new_app, run
from baton.load.command import bench


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("127.0.0.1:1", "--requests", "1"), "cannot reach 127.0.0.1:1"),
        (("http://127.0.0.1:1", "--requests", "1"), "cannot reach 127.0.0.1:1"),
        (("a:1", "b:2"), "use `baton bench compare a:1 b:2`"),
        (("compare", "a:1"), "give at least two"),
        (("a:1", "--find-rate"), "it needs a goal"),
        (("a:1", "--slo", "ttft=5"), "is not a time above 0"),
        (("a:1", "--workload", "talk"), "allowed: chat, long"),
        (("a:1", "--trace", "missing.jsonl"), "there is no trace missing.jsonl"),
        (("a:1", "--plot", "a.svg"), "give a name that ends in .png"),
        (("a:1", "--json", "missing/a.json"), "cannot write missing/a.json"),
        (("missing.json",), "missing.json cannot be read"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app()
    app.command()(bench)
    with pytest.raises(SystemExit) as ended:
        run(app, arguments, "baton bench")
    assert ended.value.code in (1, 2)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    assert line in errors


def test_the_key_of_the_environment_is_sent_over_http_too_and_never_unencrypted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "secret")
    app = new_app()
    app.command()(bench)
    with pytest.raises(SystemExit):
        run(app, ("http://192.0.2.1:1", "--requests", "1"), "baton bench")
    assert "the API key would go to 192.0.2.1 unencrypted" in capsys.readouterr().err
