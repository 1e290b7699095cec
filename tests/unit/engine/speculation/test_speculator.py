"""What the scheduler gets: fewer steps where text repeats, none of another tenant's text, and nothing that stays."""

import pytest
from tokenizers import Tokenizer

from baton.core.costs import StepCosts, StepWork
from baton.engine.request import int_array
from baton.engine.speculation.depth import speculative_work
from baton.engine.speculation.limits import FIRST_CREDIT
from baton.engine.speculation.speculative_times import EndedStep
from baton.engine.speculation.speculator import Speculator
from baton.settings.config import DEMO_MODELS, tokenizer_file
from tests.unit.engine.speculation.request import COSTS, ROOT, DecodingRequest, decode, teach_waits, work_of

FILE = list(range(1000, 1200))
NOVEL = list(range(5000, 9000))
SATURATED = StepCosts(((1, 0.001), (1000, 1.0)))


def copies(request_id: str = "r") -> DecodingRequest:
    return DecodingRequest(request_id, FILE, FILE[:100])


def test_a_copy_of_the_prompt_takes_a_fraction_of_the_steps() -> None:
    speculator, request = Speculator(), copies()
    assert decode(speculator, request) < 100 / 5
    assert list(request.tokens) == [*FILE, *FILE[:100]]
    assert request.accepted > 80
    assert request.drafted >= request.accepted


def test_the_next_turn_is_drafted_from_the_turn_before() -> None:
    speculator = Speculator()
    assert decode(speculator, DecodingRequest("1", [1, 2], NOVEL[:100])) == 99
    assert decode(speculator, DecodingRequest("2", [3, 4], NOVEL[:100])) < 20
    assert decode(speculator, DecodingRequest("3", [3, 4], NOVEL[:100]), root=b"another") == 99


def test_dropped_roots_are_not_drafted_from() -> None:
    speculator = Speculator()
    decode(speculator, DecodingRequest("1", [1, 2], NOVEL[:100]))
    alive = DecodingRequest("2", [1, 2], NOVEL[100:200])
    speculator.begin(alive, root=ROOT, grammar=None)
    speculator.drop_roots(frozenset({ROOT}))
    assert decode(speculator, alive) == 99
    assert speculator.proposer.recent.num_tokens == 0
    assert decode(speculator, DecodingRequest("3", [3, 4], NOVEL[:200])) == 199


@pytest.mark.parametrize(("costs", "wanted"), [(COSTS, True), (SATURATED, False), (None, False)])
def test_drafts_are_chosen_where_they_pay(costs: StepCosts | None, wanted: bool) -> None:
    speculator, request = Speculator(), copies()
    request.tokens.extend(FILE[1:20])
    speculator.begin(request, root=ROOT, grammar=None)
    work = work_of([request])
    assert speculator.pays([request], work, costs) is wanted
    request.tokens.append(FILE[20])
    draft = speculator.choose([request], work, costs, room=64).get("r", ())
    assert draft == (tuple(FILE[21:37]) if wanted else ())


def test_where_waiting_pays_drafts_are_chosen_if_the_first_was_right() -> None:
    """And each request's last tokens have been looked at already then."""
    speculator, request = Speculator(), DecodingRequest("r", FILE, [*NOVEL[:30], *FILE[:60], *NOVEL[40:60]])
    speculator.begin(request, root=ROOT, grammar=None)
    agreed = 0
    for token in request.target[1:-3]:
        work = work_of([request])
        waits = speculator.pays([request], work, COSTS)
        draft = speculator.proposer._drafts["r"].propose(1).tokens
        request.tokens.append(token)
        if waits and draft == (token,):
            assert speculator.choose([request], work, COSTS, room=64)
            agreed += 1
    assert 40 < agreed <= 60


def test_while_the_device_waits_only_requests_that_had_drafts_are_looked_up() -> None:
    speculator, copy, other = Speculator(), copies("copy"), DecodingRequest("new", NOVEL[:9], NOVEL[50:99])
    copy.tokens.extend(FILE[1:20])
    for request in (copy, other):
        speculator.begin(request, root=ROOT, grammar=None)
    both = [copy, other]
    assert speculator.pays(both, work_of(both), COSTS)
    copy.tokens.append(FILE[20])
    other.tokens.extend(NOVEL[:3])  # it repeats its prompt now
    assert list(speculator.choose(both, work_of(both), COSTS, room=64)) == ["copy"]
    assert set(speculator.choose(both, work_of(both), COSTS, room=64)) == {"copy", "new"}


@pytest.mark.parametrize(("num_left", "wanted"), [(1, False), (2, True)])
def test_waiting_for_the_token_that_is_drafted_brings_nothing(num_left: int, wanted: bool) -> None:
    """What a step in flight draws need not be drafted: there must be one more."""
    for always in (False, True):
        speculator = Speculator(always=always)
        decode(speculator, DecodingRequest("1", [1, 2], FILE[:60]))
        request = DecodingRequest("2", [3, 4], [*FILE[20 : 60 - num_left], *NOVEL[:20]])
        request.tokens.extend(FILE[21 : 60 - num_left])
        speculator.begin(request, root=ROOT, grammar=None)
        assert speculator.pays([request], work_of([request]), COSTS) is wanted
        assert speculator.choose([request], work_of([request]), COSTS, room=64)


def test_waiting_pays_only_if_the_further_tokens_make_up_for_it() -> None:
    """The host takes nearly as long as a step, which two more tokens are worth, and one is not."""
    speculator = Speculator()
    teach_waits(speculator, 1, 0.0093)
    request = DecodingRequest("1", FILE, FILE[:100])
    request.tokens.extend(FILE[1:97])
    speculator.begin(request, root=ROOT, grammar=None)
    assert len(speculator.choose([request], work_of([request]), COSTS, room=64)["1"]) == 2
    # For the step after the one in flight, one token may be drafted.
    request.target = FILE[:99]
    assert not speculator.pays([request], work_of([request]), COSTS)
    request.target = FILE[:100]
    assert speculator.pays([request], work_of([request]), COSTS)


@pytest.mark.parametrize(
    ("tpot_s", "bound_s"),
    [(0.013, 0.9 * 0.013), (None, 0.0102 * 3), (0.004, 0.0102 * 3), (0.0115, 0.9 * 0.0115)],
)
def test_a_request_without_drafts_waits_for_those_of_others_within_its_tpot_or_credit(
    tpot_s: float | None, bound_s: float
) -> None:
    """A plain step takes 10.2 ms. A TPOT that no step keeps does not count."""
    costs = StepCosts(((1, 0.0100), (40, 0.0102), (1000, 0.1000)))
    speculator = Speculator()
    teach_waits(speculator, 40, 0.0, costs)
    requests = [copies(str(number)) for number in range(39)]
    without = DecodingRequest("without", NOVEL[:50], NOVEL[100:200])
    for request in (*requests, without):
        request.tokens.extend(request.target[1:40])
        speculator.begin(request, root=ROOT, grammar=None, tpot_s=tpot_s if request is without else None)
    plain_s = costs.seconds(work_of([*requests, without]))

    def longest_s(*everyone: DecodingRequest, prompts: bool = False) -> float:
        work = work_of(everyone)
        drafts = speculator.choose(everyone, work, costs, room=2000, prompts=prompts)
        return costs.seconds(speculative_work(work, [(0, len(draft)) for draft in drafts.values()]))

    first_s = longest_s(*requests, without)
    assert plain_s <= first_s <= bound_s
    assert first_s > plain_s + 0.4 * (bound_s - plain_s) or bound_s < 1.08 * plain_s, "what brings too little is left"
    half_s = longest_s(*requests, without, prompts=True)
    assert half_s <= plain_s + (bound_s - plain_s) / 2, "prompts of the step have their part"
    assert half_s > plain_s or bound_s < 1.3 * plain_s
    step = EndedStep(work_of([*requests, without]), StepWork(352, 352 * 1000), 40 + 8 * 39, 5 * plain_s, 0.0, late=True)
    got = [("without", 1), *((request.request_id, 9) for request in requests)]
    speculator.ended(step, costs, got)
    if tpot_s is None:
        assert longest_s(*requests, without) == plain_s, "it has waited for a long step already"
    assert longest_s(*requests) > 3 * plain_s, "the others have saved what they wait now"


def test_only_requests_of_a_step_have_waited_for_its_drafts() -> None:
    """Others have begun too: they wait for a seat, or were preempted."""
    speculator, here, elsewhere = Speculator(), copies("here"), copies("elsewhere")
    for request in (here, elsewhere):
        speculator.begin(request, root=ROOT, grammar=None)
    plain = work_of([here])
    work = speculative_work(plain, [(len(here.tokens), 16)])
    here.take(())
    speculator.ended(EndedStep(plain, work, 1, COSTS.seconds(work), 0.004, late=True), COSTS, [("here", 1)])
    plain_s = COSTS.seconds(plain)
    credits = [
        speculator.proposer._drafts[each].wait_bound(plain_s, 1.0).credit_s / plain_s for each in ("here", "elsewhere")
    ]
    assert credits[0] < credits[1] == FIRST_CREDIT


def test_a_request_may_not_be_drafted_beyond_its_end() -> None:
    speculator, request = Speculator(), copies()
    request.tokens.extend(FILE[1:97])
    speculator.begin(request, root=ROOT, grammar=None)
    work = work_of([request])
    assert speculator.choose([request], work, COSTS, room=64) == {"r": (FILE[97], FILE[98])}
    assert speculator.choose([request], work, COSTS, room=1) == {"r": (FILE[97],)}
    assert speculator.choose([request], work, COSTS, room=0) == {}
    request.tokens.extend(FILE[97:99])
    assert speculator.choose([request], work, COSTS, room=64) == {}
    assert not speculator.pays([request], work, COSTS)


def test_all_drafts_are_taken_where_that_is_wanted() -> None:
    speculator, request = Speculator(always=True), copies()
    request.tokens.extend(FILE[1:20])
    speculator.begin(request, root=ROOT, grammar=None)
    for costs in (None, SATURATED):
        assert speculator.pays([request], work_of([request]), costs)
        assert speculator.choose([request], work_of([request]), costs, room=64) == {"r": tuple(FILE[20:36])}
    assert decode(Speculator(always=True), copies(), costs=None) < 15


def test_costs_of_no_time_bound_nothing() -> None:
    speculator, request = Speculator(always=True), DecodingRequest("r", NOVEL[:9], NOVEL[:9])
    speculator.begin(request, root=ROOT, grammar=None, tpot_s=0.01)
    costs = StepCosts(((1, 0.0), (9, 0.0)))
    assert not speculator.pays([request], work_of([request]), costs)


def test_nothing_stays_of_requests_that_ended_but_their_outputs() -> None:
    speculator = Speculator()
    for number in range(20):
        request = DecodingRequest(str(number), FILE, NOVEL[number : number + 60])
        decode(speculator, request, root=b"%d" % (number % 5))
    assert len(speculator.proposer) == 0
    assert speculator.proposer.recent.num_tokens == 20 * 61
    speculator.drop_roots(frozenset(b"%d" % number for number in range(5)))
    assert speculator.proposer.recent.num_tokens == 0


def test_an_edited_file_takes_a_fifth_of_the_steps() -> None:
    """Real text: a module of this project whose names are changed."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file(DEMO_MODELS / "llama")))
    with open(__file__) as file:
        text = file.read()
    edited = text.replace("speculator, request =", "drafts, decoding =").replace("assert not", "assert False is")
    prompt, target = (tokenizer.encode(each, add_special_tokens=False).ids for each in (text, edited))
    assert edited != text
    request = DecodingRequest("r", prompt, target)
    assert decode(Speculator(), request) < len(target) / 5
    assert request.accepted > 0.6 * request.drafted


def test_text_unlike_the_prompt_is_hardly_drafted_for() -> None:
    request = DecodingRequest("r", NOVEL[:2000], [token % 7919 for token in range(0, 900_000, 1009)])
    decode(Speculator(), request)
    assert request.drafted < 0.05 * 900


def test_the_newest_tokens_of_many_requests_are_looked_up_together() -> None:
    speculator = Speculator()
    requests = [copies(str(number)) for number in range(8)]
    for number, request in enumerate(requests):
        request.tokens.extend(FILE[1 : 20 + number])
        speculator.begin(request, root=ROOT, grammar=None)
    drafts = speculator.choose(requests, work_of(requests), COSTS, room=12)
    assert sum(map(len, drafts.values())) <= 12
    for request in requests:
        draft = drafts.get(request.request_id, ())
        assert draft == tuple(FILE[len(request.tokens) - len(FILE) :][: len(draft)])
    assert int_array(list(requests[0].tokens)) == requests[0].tokens
