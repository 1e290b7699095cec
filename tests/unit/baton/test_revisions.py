"""Revisions: equal for equal weights, and a line that says which ones serve at once."""

import pytest

from baton.protos.v1 import node_status_pb2
from baton.rpc.revisions import Member, mixture, revision_of

MODEL = node_status_pb2.ModelIdentity(name="m", architecture="Llama", config_digest="c", weights_digest="w")


def changed(**fields: str) -> node_status_pb2.ModelIdentity:
    model = node_status_pb2.ModelIdentity()
    model.CopyFrom(MODEL)
    for name, value in fields.items():
        setattr(model, name, value)
    return model


def test_names_are_no_part_of_a_revision() -> None:
    assert revision_of(changed(name="n", revision_name="main")) == revision_of(MODEL)
    assert len(revision_of(MODEL)) == 12


@pytest.mark.parametrize("field", ["architecture", "config_digest", "weights_digest"])
def test_what_nodes_compare_is_part_of_it(field: str) -> None:
    assert revision_of(changed(**{field: "other"})) != revision_of(MODEL)


def test_a_content_digest_which_older_versions_lack_is_no_part_of_it() -> None:
    assert revision_of(changed(content_digest="aa")) == revision_of(MODEL)


def test_a_node_that_was_never_reached_has_none() -> None:
    assert revision_of(node_status_pb2.ModelIdentity()) == ""


def test_one_version_and_one_revision_need_no_line() -> None:
    assert mixture([]) == ""
    assert mixture([Member("g", "1"), Member("p", "1", "aa"), Member("d", "1", "aa", "main"), Member("lost", "")]) == ""


def test_mixed_versions_and_revisions_are_one_line_with_who_has_which() -> None:
    members = [Member("g", "2"), Member("p", "1", "aa"), Member("d", "2", "aa", "v7"), Member("e", "2", "bb")]
    assert mixture(members) == (
        "mixed versions: 2 on g and d and e, 1 on p; mixed revisions of the weights: v7 (aa) on p and d, bb on e"
    )


def test_two_revisions_of_one_name_are_two_and_many_nodes_are_counted() -> None:
    members = [*(Member(f"n{number}", "1", "aa", "main") for number in range(9)), Member("e", "1", "bb", "main")]
    assert mixture(members) == "mixed revisions of the weights: main (aa) on 9 processes, main (bb) on e"
