"""What is proposed for several requests: all of them in turn, within what one step may look up."""

from baton.engine.speculation.depth import NO_PROPOSAL
from baton.engine.speculation.proposer import Proposer
from tests.unit.engine.speculation.request import ROOT, DecodingRequest

FILE = list(range(1000, 1200))
OTHER = list(range(5000, 5200))


def proposer() -> Proposer:
    return Proposer(grammars=None, looks_always=True)


def begin(proposes: Proposer, request: DecodingRequest, root: bytes | None = ROOT) -> None:
    proposes.begin(request, root=root, grammar=None, tpot_s=None)


def test_a_request_that_has_not_begun_gets_no_drafts() -> None:
    proposes, request = proposer(), DecodingRequest("r", FILE, FILE[:100])
    assert proposes.propose([request], pending=0) == [NO_PROPOSAL]
    assert proposes.get("r") is None
    proposes.end("r")
    assert len(proposes) == 0


def test_a_request_begins_once() -> None:
    proposes, first, second = proposer(), DecodingRequest("1", FILE, OTHER), DecodingRequest("2", [3, 4], OTHER)
    begin(proposes, first)
    begin(proposes, first, root=b"another")
    assert len(proposes) == 1
    first.tokens.extend(OTHER[1:])
    proposes.end("1")
    begin(proposes, second)
    second.tokens.extend(OTHER[1:20])
    assert proposes.propose([second], pending=0)[0].tokens[:2] == (OTHER[20], OTHER[21])


def test_a_step_searches_for_a_bounded_number_of_requests_and_each_has_its_turn() -> None:
    proposes = proposer()
    requests = [DecodingRequest(str(number), [*FILE, 7, *FILE[:20]], FILE[20:]) for number in range(200)]
    for request in requests:
        begin(proposes, request, root=None)
    counts = []
    for token in FILE[21:61]:
        counts.append(sum(bool(proposal.tokens) for proposal in proposes.propose(requests, pending=0)))
        for request in requests:
            request.tokens.append(token)
    assert counts[0] == 64
    assert counts[-1] == 200


def test_requests_whose_searches_find_nothing_do_not_keep_others_from_theirs() -> None:
    proposes, last = proposer(), DecodingRequest("last", FILE, FILE)
    hopeless = [DecodingRequest(str(number), OTHER, ()) for number in range(100)]
    for request in (*hopeless, last):
        begin(proposes, request, root=None)
    found = []
    for step, token in enumerate(FILE[1:110]):
        for request in hopeless:
            request.tokens.append(9000 + 31 * step)
        last.tokens.append(token)
        found.append(proposes.propose([*hopeless, last], pending=0)[-1].tokens)
    assert any(found)
