"""Clients and peers that send what they must not: no message of theirs may change another request's tokens."""

from collections.abc import Callable
from functools import partial
from random import Random

from baton.core.errors import NoNode
from baton.core.sampling import ResolvedSampling
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.convert import sampling_to_proto
from baton.rpc.error_detail import to_detail
from tests.simulation.decode import DecodeProcess
from tests.simulation.network import Life
from tests.simulation.node import Node
from tests.simulation.reference import EOS, VOCAB_SIZE
from tests.simulation.world import World

_HOSTILE_CLIENT = "hostile client"
_MESSAGES = 12
# Keys and leases are small numbers here, so a guess often hits one that is in use.
_NUMBERS = range(1, 7)


class HostileClient:
    """A client with a session of its own at one node, which sends anything.

    Args:
        address: the node's.
    """

    def __init__(self, world: World, address: str) -> None:
        self._world = world
        self._life = Life(world.clock, _HOSTILE_CLIENT, 0)
        self._stream = world.network.open(self._life, address, "session", _ignore, _ignore)

    def stay(self, seconds: float) -> None:
        """Sends for so long, then leaves."""
        for _ in range(_MESSAGES):
            self._life.after(seconds * self._world.random.random(), self._send)
        self._life.after(seconds, self._stream.cancel)

    def _send(self) -> None:
        self._stream.to_server(_any_message(self._world.random))


def lie_about_leases(world: World, prefill: Callable[[], Node], decode: Node, seconds: float) -> None:
    """A prefill node reports leases of the decode node that are not its own: handed over with any token, or lost."""
    for _ in range(_MESSAGES):
        at_s = seconds * world.random.random()
        world.clock.after(at_s, partial(_lie, world.random, prefill, decode))


def _lie(random: Random, prefill: Callable[[], Node], decode: Node) -> None:
    assert isinstance(decode, DecodeProcess)
    incarnation = prefill().life.incarnation
    # NOTE: a ticket that its gateway binds to no prefill node (0) is believed from each.
    others = [lease for lease, owner in decode.decoding.leases().items() if owner not in (0, incarnation)]
    if not others:
        return
    lease = random.choice(others)
    token = common_pb2.Token(token_id=random.randrange(VOCAB_SIZE), index=random.randrange(2))
    hand_over = pb.HandOver(lease=lease, first_token=token)
    if random.random() < 0.3:
        hand_over.ClearField("first_token")
    lies = (
        pb.PairRequest(hand_over=hand_over),
        pb.PairRequest(quiet=pb.Quiet(lease=lease, error=to_detail(NoNode("it is lost")))),
        pb.PairRequest(quiet=pb.Quiet(lease=lease)),
    )
    decode.life.run(partial(decode.lied_to, incarnation, random.choice(lies)))


def _any_message(random: Random) -> pb.SessionRequest:
    key, lease = random.choice(_NUMBERS), random.choice(_NUMBERS)
    output = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(0, 2))]
    match random.randrange(8):
        case 0:
            return pb.SessionRequest(cancel=pb.CancelRequest(key=key))
        case 1:
            return pb.SessionRequest(renew=pb.RenewTicket(key=key, failed_lease=lease, output_token_ids=output))
        case 2:
            return pb.SessionRequest(here=pb.PrefillHere(key=key, failed_lease=lease, output_token_ids=output))
        case 3:
            return pb.SessionRequest()
    # Now and then a prompt is empty, or longer than any node can hold.
    prompt = [random.randrange(EOS) for _ in range(random.choice((0, 1, 3, 8, 60)))]
    submit = pb.SubmitRequest(
        key=key,
        request_id="r1",
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=sampling_to_proto(ResolvedSampling(max_tokens=random.randint(1, 8), temperature=0.0)),
        policy=random.choice((pb.LOCAL_POLICY_STRICT, pb.LOCAL_POLICY_PREFER, pb.LOCAL_POLICY_LOCAL)),
        placement=random.choice(
            (pb.PLACEMENT_UNSPECIFIED, pb.PLACEMENT_REMOTE, pb.PLACEMENT_LOCAL, pb.PLACEMENT_SPLIT)
        ),
        prefill_available=random.random() < 0.7,
        max_queue_s=random.choice((0.0, 0.2)),
        split_tokens=random.randint(0, 9),
        prefill_incarnation=random.choice((0, 1001, 1002)),
    )
    return pb.SessionRequest(submit=submit)


def _ignore(_: object) -> None:
    """It does not care for answers."""
