"""Which nodes can exchange KV, and the reasons that are reported when they cannot."""

from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import PeerRefused
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import FP8_DTYPES, KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.flows import Flow, RankPair, part_flows
from kvtransfer.plan import WIRE_NEWEST, WIRE_OLDEST, NodeDescription, PlanRefused, agree, links_between, wire_oldest

SPEC = KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
NODE = NodeDescription(
    architecture="LlamaForCausalLM",
    config_digest="c0ffee",
    weights_digest="beef",
    spec=SPEC,
    shape=KVCacheShape(KVCacheLayout.NHD, 16, 64),
    wire_oldest=WIRE_OLDEST,
    wire_newest=WIRE_NEWEST,
    package_version="1.0.0",
)


def test_equal_nodes_agree_on_the_newest_wire() -> None:
    plan = agree(NODE, NODE)
    assert plan.wire_version == WIRE_NEWEST
    assert plan.spec.bytes_per_token_layer == 2 * 2 * 8 * 2
    assert plan.spec.bytes_per_token == 4 * plan.spec.bytes_per_token_layer


def test_layout_block_size_number_of_blocks_and_package_version_may_differ() -> None:
    other = replace(NODE, shape=KVCacheShape(KVCacheLayout.BLHNC, 64, 7), package_version="2.1.0")
    assert agree(NODE, other) == agree(NODE, NODE)


@pytest.mark.parametrize("field", ["architecture", "config_digest", "weights_digest"])
def test_another_model_is_refused(field: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(NODE, replace(NODE, **{field: "other"}))  # type: ignore[arg-type]
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.theirs) == (field, "other")
    assert "checkpoint" in mismatch.cure


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 5), ("num_kv_heads", 1), ("head_dim", 16), ("kind", KVKind.MLA), ("dtype", "float16")],
)
def test_another_kind_of_kv_is_refused(field: str, value: object) -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(NODE, replace(NODE, spec=replace(SPEC, **{field: value})))  # type: ignore[arg-type]
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == (field, str(getattr(SPEC, field)), str(value))


def test_two_8_bit_caches_are_as_different_as_any_two_dtypes() -> None:
    ours, theirs = (replace(NODE, spec=replace(SPEC, dtype=dtype)) for dtype in FP8_DTYPES)
    with pytest.raises(PlanRefused) as refused:
        agree(ours, theirs)
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("dtype", *FP8_DTYPES)
    assert "--kv-cache-dtype" in mismatch.cure
    assert "--kv-convert-from" not in mismatch.cure
    assert agree(ours, ours).spec.bytes_per_token * 2 == agree(NODE, NODE).spec.bytes_per_token


def test_the_cure_of_another_dtype_names_the_option_to_convert() -> None:
    fp8 = replace(NODE, spec=replace(SPEC, dtype=FP8_DTYPES[0]))
    for ours, theirs in ((NODE, fp8), (fp8, NODE)):
        with pytest.raises(PlanRefused) as refused:
            agree(ours, theirs)
        (mismatch,) = refused.value.mismatches
        assert "--kv-convert-from" in mismatch.cure
        assert "BATON_KV_CONVERT_FROM" in mismatch.cure


@pytest.mark.parametrize("kept", [*FP8_DTYPES, "float32", "float16"])
def test_kv_is_sent_in_the_receivers_dtype_if_it_accepts_a_conversion(kept: str) -> None:
    receiver = replace(NODE, spec=replace(SPEC, dtype=kept), converted_kv_dtypes=("float32", "bfloat16"))
    if kept == "float32":
        receiver = replace(receiver, converted_kv_dtypes=("bfloat16",))
    plan = agree(NODE, receiver)
    assert plan == agree(receiver, NODE)
    assert plan.spec == receiver.spec
    assert (plan.converted_from, plan.conversion) == ("bfloat16", f"bfloat16 to {kept}")


def test_equal_dtypes_are_never_converted() -> None:
    plan = agree(NODE, replace(NODE, converted_kv_dtypes=("bfloat16", "float32")))
    assert plan == agree(NODE, NODE)
    assert (plan.converted_from, plan.conversion) == (None, "")


def test_a_dtype_that_the_receiver_does_not_list_is_refused() -> None:
    receiver = replace(NODE, spec=replace(SPEC, dtype=FP8_DTYPES[0]), converted_kv_dtypes=("float32",))
    with pytest.raises(PlanRefused):
        agree(NODE, receiver)


def test_8_bits_are_never_converted() -> None:
    sender = replace(NODE, spec=replace(SPEC, dtype=FP8_DTYPES[0]))
    with pytest.raises(PlanRefused) as refused:
        agree(sender, replace(NODE, converted_kv_dtypes=FP8_DTYPES))
    assert [item.field for item in refused.value.mismatches] == ["dtype"]


def test_a_conversion_does_not_hide_other_mismatches() -> None:
    theirs = replace(NODE, spec=replace(SPEC, dtype=FP8_DTYPES[0], head_dim=16), converted_kv_dtypes=("bfloat16",))
    with pytest.raises(PlanRefused) as refused:
        agree(NODE, theirs)
    assert [item.field for item in refused.value.mismatches] == ["head_dim"]


def test_one_node_that_is_batch_invariant_and_one_that_is_not_are_refused() -> None:
    invariant = replace(NODE, batch_invariant=True)
    with pytest.raises(PlanRefused) as refused:
        agree(invariant, NODE)
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("batch_invariant", "on", "off")
    assert "BATON_BATCH_INVARIANT" in mismatch.cure
    assert agree(invariant, invariant) == agree(NODE, NODE)


def test_a_node_whose_rows_are_in_order_and_one_whose_are_not_are_refused() -> None:
    chunks = replace(NODE, batch_invariant=True)
    in_order = replace(chunks, rows_in_order=True)
    with pytest.raises(PlanRefused) as refused:
        agree(in_order, chunks)
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours) == ("rows_in_order", "in the order of decodes")
    assert "same version" in mismatch.cure
    agree(in_order, in_order)


@pytest.mark.parametrize("field", ["tensor_parallel_size", "expert_parallel", "attention_data_parallel"])
def test_batch_invariant_nodes_whose_ranks_add_other_parts_are_refused(field: str) -> None:
    ours = replace(NODE, batch_invariant=True, tensor_parallel_size=2)
    changes: dict[str, Any] = {field: 4 if field == "tensor_parallel_size" else True}
    theirs = replace(ours, **changes)
    with pytest.raises(PlanRefused) as refused:
        agree(ours, theirs)
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.theirs) == (field, str(changes[field]))
    assert "--expert-parallel" in mismatch.cure
    assert "BATON_BATCH_INVARIANT" in mismatch.cure
    agree(theirs, theirs)
    agree(replace(ours, batch_invariant=False), replace(theirs, batch_invariant=False))


def test_batch_invariant_nodes_do_not_convert() -> None:
    """A prompt's later chunks would attend to other bits than in one process with the receiver's cache."""
    sender = replace(NODE, batch_invariant=True)
    receiver = replace(sender, spec=replace(SPEC, dtype=FP8_DTYPES[0]), converted_kv_dtypes=("bfloat16",))
    for ours, theirs in ((sender, receiver), (receiver, sender)):
        with pytest.raises(PlanRefused) as refused:
            agree(ours, theirs)
        (mismatch,) = refused.value.mismatches
        assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("dtype", ours.spec.dtype, theirs.spec.dtype)
        assert "--kv-cache-dtype" in mismatch.cure
        assert "without BATON_BATCH_INVARIANT (--batch-invariant)" in mismatch.cure
    off = replace(sender, batch_invariant=False), replace(receiver, batch_invariant=False)
    assert agree(*off).converted_from == "bfloat16"
    assert agree(sender, replace(sender, converted_kv_dtypes=("float32",))).converted_from is None


def test_no_conversion_is_offered_to_batch_invariant_nodes() -> None:
    ours = replace(NODE, batch_invariant=True)
    with pytest.raises(PlanRefused) as refused:
        agree(ours, replace(ours, spec=replace(SPEC, dtype=FP8_DTYPES[0])))
    (mismatch,) = refused.value.mismatches
    assert mismatch.field == "dtype"
    assert "--kv-convert-from" not in mismatch.cure


def test_a_damaged_copy_of_the_same_model_is_refused_with_its_cure() -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(replace(NODE, content_digest="aa"), replace(NODE, content_digest="bb"))
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("content_digest", "aa", "bb")
    assert "damaged" in mismatch.cure


def test_a_node_of_a_version_without_content_digest_still_pairs() -> None:
    known = replace(NODE, content_digest="aa")
    assert agree(known, NODE) == agree(NODE, known) == agree(known, known) == agree(NODE, NODE)


def test_other_weights_are_one_mismatch_although_their_content_differs_too() -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(replace(NODE, content_digest="aa"), replace(NODE, content_digest="bb", weights_digest="other"))
    assert [item.field for item in refused.value.mismatches] == ["weights_digest"]


def test_every_mismatch_is_listed() -> None:
    theirs = replace(NODE, weights_digest="other", spec=replace(SPEC, num_layers=2, dtype="float32"), wire_oldest=9)
    theirs = replace(theirs, wire_newest=9)
    with pytest.raises(PeerRefused) as refused:
        agree(NODE, theirs)
    assert isinstance(refused.value, PlanRefused)
    assert [item.field for item in refused.value.mismatches] == ["weights_digest", "num_layers", "dtype", "wire"]
    for item in refused.value.mismatches:
        assert item.field in str(refused.value)
        assert item.cure in str(refused.value)


def test_wire_ranges_that_overlap_agree_on_the_newest_common_version() -> None:
    assert (
        agree(replace(NODE, wire_oldest=1, wire_newest=3), replace(NODE, wire_oldest=2, wire_newest=7)).wire_version
        == 3
    )
    assert (
        agree(replace(NODE, wire_oldest=2, wire_newest=7), replace(NODE, wire_oldest=1, wire_newest=2)).wire_version
        == 2
    )


def test_the_cure_of_a_wire_mismatch_names_the_older_node() -> None:
    newer = replace(NODE, wire_oldest=WIRE_NEWEST + 1, wire_newest=WIRE_NEWEST + 2, package_version="9.0.0")
    with pytest.raises(PlanRefused) as ours_older:
        agree(NODE, newer)
    assert ours_older.value.mismatches[0].cure == "upgrade this node from package version 1.0.0"
    with pytest.raises(PlanRefused) as theirs_older:
        agree(newer, NODE)
    assert theirs_older.value.mismatches[0].cure == "upgrade the other node from package version 1.0.0"


def test_numbers_of_ranks_may_differ_and_decide_the_links() -> None:
    prefill, decode = replace(NODE, tensor_parallel_size=1), replace(NODE, tensor_parallel_size=2)
    assert agree(prefill, decode) == agree(NODE, NODE)
    links = links_between(prefill, decode)
    assert set(links) == {RankPair(0, 0), RankPair(0, 1)}
    assert [flow.heads for (flow,) in links.values()] == [range(1), range(1, 2)]


LATENT = replace(
    NODE,
    spec=KVCacheSpec(KVKind.MLA, num_layers=4, num_kv_heads=1, head_dim=8, dtype="bfloat16"),
    tensor_parallel_size=2,
)
OWN = replace(
    LATENT,
    attention_data_parallel=True,
    wire_oldest=wire_oldest(LATENT.spec, attention_data_parallel=True),
)


@pytest.mark.parametrize("receiver", [OWN, LATENT], ids=["own", "split"])
def test_each_rank_with_requests_of_its_own_sends_all_layers_to_every_rank(receiver: NodeDescription) -> None:
    links = links_between(OWN, receiver)
    assert set(links) == {RankPair(sender, to) for sender in range(2) for to in range(2)}
    assert all(flows == (Flow(range(4), range(1)),) for flows in links.values())


def test_a_rank_that_owns_requests_gets_them_from_all_ranks_that_share_them() -> None:
    assert links_between(LATENT, OWN) == links_between(LATENT, LATENT)
    assert agree(LATENT, OWN).wire_version == WIRE_NEWEST


def test_a_node_that_knows_no_owners_is_refused() -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(OWN, replace(LATENT, wire_newest=5))
    assert [mismatch.field for mismatch in refused.value.mismatches] == ["wire"]


def test_ranks_that_the_heads_cannot_be_dealt_out_to_are_refused() -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(NODE, replace(NODE, tensor_parallel_size=3))
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("tensor_parallel_size", "1", "3")
    assert "divisor or a multiple" in mismatch.cure


INDEX = KVCacheSpec(KVKind.MLA, num_layers=4, num_kv_heads=1, head_dim=6, dtype="bfloat16")
STATE = KVCacheSpec(KVKind.STATE, num_layers=3, num_kv_heads=8, head_dim=10, dtype="float32")
DRAFT = replace(SPEC, num_layers=1)
WHOLE = replace(NODE, spec=replace(SPEC, index=INDEX, state=STATE), wire_oldest=wire_oldest(replace(SPEC, index=INDEX)))


@pytest.mark.parametrize(
    ("part", "theirs", "field"),
    [
        ("index", None, "index"),
        ("state", None, "state"),
        ("index", replace(INDEX, dtype="float32"), "index.dtype"),
        ("index", replace(INDEX, head_dim=5), "index.head_dim"),
        ("state", replace(STATE, num_layers=2), "state.num_layers"),
        ("state", replace(STATE, num_kv_heads=4), "state.num_kv_heads"),
    ],
)
def test_another_part_is_refused(part: str, theirs: KVCacheSpec | None, field: str) -> None:
    assert agree(WHOLE, WHOLE).spec == WHOLE.spec
    other = replace(WHOLE, spec=replace(WHOLE.spec, **{part: theirs}))  # type: ignore[arg-type]
    for ours, peer in ((WHOLE, other), (other, WHOLE)):
        with pytest.raises(PlanRefused) as refused:
            agree(ours, peer)
        (mismatch,) = refused.value.mismatches
        assert mismatch.field == field
        assert mismatch.cure


def test_index_and_state_travel_as_they_are_where_kv_is_converted() -> None:
    receiver = replace(WHOLE, spec=replace(WHOLE.spec, dtype="float32"), converted_kv_dtypes=("bfloat16",))
    plan = agree(WHOLE, receiver)
    assert (plan.spec.dtype, plan.spec.index, plan.spec.state) == ("float32", INDEX, STATE)


def test_a_peer_that_knows_only_kv_is_refused_by_a_model_with_more() -> None:
    """Its description has neither index nor state."""
    older = replace(NODE, wire_newest=4)
    with pytest.raises(PlanRefused) as refused:
        agree(WHOLE, older)
    assert {mismatch.field for mismatch in refused.value.mismatches} == {"index", "state", "wire"}
    assert agree(NODE, older).wire_version == 4


@pytest.mark.parametrize("index", [None, INDEX])
@pytest.mark.parametrize("state", [None, STATE])
def test_kv_of_layers_that_draft_travels_between_nodes_that_both_have_them(
    index: KVCacheSpec | None, state: KVCacheSpec | None
) -> None:
    spec = replace(SPEC, index=index, state=state)
    plain = replace(NODE, spec=spec, wire_oldest=wire_oldest(spec))
    drafting = replace(plain, spec=replace(plain.spec, draft=DRAFT))
    assert wire_oldest(drafting.spec) == plain.wire_oldest
    assert agree(drafting, drafting).spec == drafting.spec
    older = replace(drafting, wire_newest=6)
    for sender, receiver in ((drafting, plain), (plain, drafting), (drafting, older), (older, drafting)):
        plan = agree(sender, receiver)
        assert plan == agree(receiver, sender)
        assert (plan.spec, plan.has_draft) == (plain.spec, False)
        assert links_between(sender, receiver) == links_between(plain, plain), "all others keep their numbers"
    both = links_between(drafting, drafting)[RankPair(0, 0)]
    assert both[:-1] == links_between(plain, plain)[RankPair(0, 0)]


def test_layers_that_draft_with_other_kv_are_refused() -> None:
    drafting = replace(NODE, spec=replace(SPEC, draft=DRAFT))
    with pytest.raises(PlanRefused) as refused:
        agree(drafting, replace(drafting, spec=replace(SPEC, draft=replace(DRAFT, num_layers=2))))
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("draft.num_layers", "1", "2")


def test_nodes_with_different_heads_that_draft_are_refused_with_the_cure() -> None:
    drafting = replace(NODE, spec=replace(SPEC, draft=DRAFT), wire_oldest=wire_oldest(replace(SPEC, draft=DRAFT)))
    ours, theirs = replace(drafting, draft_digest="a"), replace(drafting, draft_digest="b")
    assert agree(ours, ours).spec.draft == DRAFT
    for other, shown in ((theirs, "b"), (drafting, "none")):
        with pytest.raises(PlanRefused) as refused:
            agree(ours, other)
        (mismatch,) = refused.value.mismatches
        assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("draft_digest", "a", shown)
        assert "--draft-head" in mismatch.cure


def test_another_index_of_the_layers_that_draft_is_refused() -> None:
    drafting = replace(NODE, spec=replace(SPEC, draft=replace(DRAFT, index=INDEX)))
    assert agree(drafting, drafting).spec == drafting.spec
    for index, field in ((None, "draft.index"), (replace(INDEX, head_dim=5), "draft.index.head_dim")):
        other = replace(drafting, spec=replace(SPEC, draft=replace(DRAFT, index=index)))
        with pytest.raises(PlanRefused) as refused:
            agree(drafting, other)
        (mismatch,) = refused.value.mismatches
        assert mismatch.field == field
        assert mismatch.cure


def test_each_part_is_dealt_out_by_its_own_heads() -> None:
    links = links_between(replace(WHOLE, tensor_parallel_size=1), replace(WHOLE, tensor_parallel_size=4))
    assert list(links) == [RankPair(0, rank) for rank in range(4)]
    assert links[RankPair(0, 3)] == (
        Flow(range(4), range(1, 2)),
        Flow(range(4, 8), range(1)),
        Flow(range(8, 11), range(6, 8)),
    )


def test_a_link_may_carry_one_part_only() -> None:
    spec = replace(INDEX, num_layers=1, state=STATE)
    links = part_flows(spec, senders=2, receivers=1)
    assert links == {
        RankPair(0, 0): (Flow(range(1, 4), range(4)),),
        RankPair(1, 0): (Flow(range(1), range(1)), Flow(range(1, 4), range(4, 8))),
    }


def test_segments_are_sealed_unless_one_node_is_older_than_seals() -> None:
    older = replace(NODE, wire_oldest=3, wire_newest=3)
    assert agree(NODE, NODE).sealed
    assert not agree(NODE, older).sealed
    assert not agree(older, NODE).sealed
