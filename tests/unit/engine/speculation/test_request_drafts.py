"""The drafts for one request and their chances."""

from collections.abc import Sequence

import pytest

from baton.engine.request import int_array
from baton.engine.speculation.acceptance import Acceptance, Basis, OwnAcceptance, bases_of
from baton.engine.speculation.limits import MOST_DRAFTS
from baton.engine.speculation.recent_outputs import RecentOutputs
from baton.engine.speculation.request_drafts import RequestDrafts
from tests.unit.engine.speculation.request import plenty

FILE = list(range(1000, 1200))
NOVEL = list(range(5000, 9000))


def drafts_of(
    tokens: Sequence[int], *, recent: RecentOutputs | None = None, looks_always: bool = False
) -> RequestDrafts:
    return RequestDrafts(
        int_array(list(tokens)),
        prompt_tokens=0,
        root=b"root",
        recent=RecentOutputs(plenty()) if recent is None else recent,
        grammar=None,
        acceptance=Acceptance(),
        places=plenty(),
        searches=plenty(),
        looks_always=looks_always,
    )


def test_a_copied_part_of_the_prompt_goes_on() -> None:
    drafts = drafts_of([*FILE, 7, *FILE[20:60]])
    assert drafts.propose(8).tokens == tuple(FILE[60:68])
    assert drafts.propose(3).tokens == tuple(FILE[60:63])
    assert drafts.propose(0).tokens == ()
    assert drafts.propose(8).context == len(FILE) + 40


def test_a_loop_goes_on_for_ever() -> None:
    assert drafts_of([9] * 50).propose(16).tokens == (9,) * 16
    assert drafts_of([1, 2, 3, 4, 5] * 10).propose(16).tokens == tuple([1, 2, 3, 4, 5] * 4)[:16]


def test_chances_never_rise() -> None:
    drafts = drafts_of([*FILE, 7, *FILE[20:24]])
    for token in FILE[24:60]:
        chances = drafts.propose(MOST_DRAFTS).chances
        assert list(chances) == sorted(chances, reverse=True)
        assert all(0.0 < chance < 1.0 for chance in chances)
        drafts._tokens.append(token)


def test_a_longer_match_is_trusted_more() -> None:
    acceptance = OwnAcceptance(Acceptance())
    for basis in (Basis.OWN, Basis.OTHERS):
        chances = [acceptance.chance(bases_of(basis, length, 1)[0]) for length in range(3, 100)]
        assert chances == sorted(chances)
        assert chances[-1] > chances[0]


def test_accepted_drafts_raise_the_chances_and_wrong_ones_lower_them() -> None:
    right, wrong = drafts_of([*FILE, *FILE[:20]]), drafts_of([*FILE, *FILE[:20]])
    before = right.propose(4).chances[0]
    assert wrong.propose(4).chances[0] == before
    right._tokens.extend(FILE[20:30])
    wrong._tokens.extend([5, *FILE[50:70]])
    assert right.propose(4).chances[0] > before > wrong.propose(4).chances[0]


def test_one_request_teaches_the_chances_of_others() -> None:
    shared = Acceptance()
    teacher, other = OwnAcceptance(shared), OwnAcceptance(shared)
    before = OwnAcceptance(shared).chance(Basis.OWN)
    for _ in range(100):
        teacher.learn([Basis.OWN], 0)
    assert other.chance(Basis.OWN) < 0.3 * before
    assert teacher.chance(Basis.OWN) < other.chance(Basis.OWN)


def test_chances_follow_a_change() -> None:
    shared = Acceptance()
    for _ in range(10_000):
        shared.learn(Basis.OWN, right=0, wrong=1)
    assert shared.chance(Basis.OWN) < 0.05
    for _ in range(2_000):
        shared.learn(Basis.OWN, right=1)
    assert shared.chance(Basis.OWN) > 0.6


def test_drafts_go_on_after_an_edit() -> None:
    """A token is replaced, or one is added: what followed it in the prompt is drafted at once."""
    drafts = drafts_of([*FILE, *FILE[:40]])
    drafts.propose(8)
    drafts._tokens.append(3)
    assert drafts.propose(4).tokens == tuple(FILE[41:45])
    drafts._tokens.append(FILE[40])
    assert drafts.propose(4).tokens == tuple(FILE[41:45])


def test_drafts_do_not_resume_beyond_an_output_of_another_request() -> None:
    recent = RecentOutputs(plenty())
    recent.add(b"root", int_array(FILE[:40]))
    recent.add(b"root", int_array(NOVEL[:40]))
    drafts = drafts_of([1, *FILE[:38]], recent=recent)
    assert drafts.propose(8).tokens == tuple(FILE[38:40])
    drafts._tokens.extend([*FILE[38:40], 7])
    assert drafts.propose(8).tokens == ()


def test_an_output_of_the_tenant_goes_on_unless_the_sequence_has_a_longer_match() -> None:
    recent = RecentOutputs(plenty())
    recent.add(b"root", int_array(FILE))
    assert drafts_of([1, 2, *FILE[30:35]], recent=recent).propose(3).tokens == tuple(FILE[35:38])
    tokens = [*FILE[35:40], 7, 8, 9, 1, 2, *FILE[35:40]]
    assert drafts_of(tokens, recent=recent).propose(3).tokens == (7, 8, 9)
    recent.add(b"root", int_array([1, 2, *FILE[35:40], 99, 98, 97]))
    assert drafts_of(tokens, recent=recent).propose(3).tokens == (99, 98, 97)
    # A match of 8 tokens of its own is enough.
    recent.add(b"root", int_array([5, *FILE[32:40], 99, 98, 97]))
    assert drafts_of([*FILE[32:40], 7, 8, 9, 5, *FILE[32:40]], recent=recent).propose(3).tokens == (7, 8, 9)


def test_outputs_of_another_root_are_never_drafted() -> None:
    recent = RecentOutputs(plenty())
    recent.add(b"another", int_array(FILE))
    assert drafts_of([1, 2, *FILE[30:35]], recent=recent).propose(3).tokens == ()


def test_a_request_forgets_its_root() -> None:
    recent = RecentOutputs(plenty())
    recent.add(b"root", int_array(FILE))
    drafts = drafts_of([1, 2, *FILE[30:50]], recent=recent)
    assert drafts.propose(3).tokens
    drafts.forget_root()
    assert drafts.propose(3).tokens == ()
    drafts._tokens.append(FILE[50])
    assert drafts.propose(3).tokens == ()
    assert drafts.root is None


@pytest.mark.parametrize("looks_always", [False, True])
def test_a_request_without_accepted_drafts_is_looked_at_less_often(looks_always: bool) -> None:
    drafts = drafts_of(NOVEL[:100], looks_always=looks_always)
    looks = set()
    for token in NOVEL[100:300]:
        drafts.propose(16)
        looks.add(drafts._looked_at)
        drafts._tokens.append(token)
    assert len(looks) == 200 if looks_always else len(looks) < 80
    # A copy is noticed after a few tokens.
    seen = 0
    for token in NOVEL[110:120]:
        drafts._tokens.append(token)
        seen += bool(drafts.propose(16).tokens)
    assert seen >= 4
