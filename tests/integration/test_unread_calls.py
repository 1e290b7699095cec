"""Operators see a chat template whose tool calls nobody reads, without looking for a line of the gateway's log."""

import json
from pathlib import Path

from tests.integration.cluster import LLAMA, machines
from tests.unit.gateway.chat.checkpoints import TEMPLATES
from tests.warm import BATON, run_warm


def test_the_status_of_a_cluster_names_a_template_whose_calls_nobody_reads(tmp_path: Path) -> None:
    template = tmp_path / "unknown.jinja"
    template.write_text(TEMPLATES["unknown"])
    with machines() as started:
        (decode,) = started.nodes(("decode", {"model": LLAMA}))
        gateway = started.gateway([], [decode], model=LLAMA, chat_template=template, local_policy="local")
        shown = run_warm(BATON, "status", "--target", gateway.address)
        found = run_warm(BATON, "status", "--target", gateway.address, "--json")
    words = "shows tools in an unknown format: calls come out as text"
    assert words in shown.stdout, shown.stderr
    assert [words in warning for warning in json.loads(found.stdout)["warnings"]] == [True]
