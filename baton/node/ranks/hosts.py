"""The hosts of one node: the ranks of each, and the address at which they meet. Pure."""

from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.core.setting_names import shown
from baton.rpc.server import ListenAddress
from baton.settings.node_config import NodeSettings

# Time that hosts of a node wait for each other. They start in any order, and each may have to find its model first.
JOIN_S = 20 * 60.0


@dataclass(frozen=True)
class Hosts:
    """The place of this host. A node of one host has no leader address.

    Attributes:
        rank: of this host; host 0 leads.
        ranks_each: number of ranks of each host; the first rank of host h is h * ranks_each.
        leader: the address at which host 0 waits for the others.
    """

    count: int
    rank: int
    ranks_each: int
    leader: ListenAddress | None

    @classmethod
    def of(cls, settings: NodeSettings) -> "Hosts":
        """The hosts that the settings name.

        Raises:
            ConfigError: the settings contradict each other.
        """
        ranks, count, rank = settings.tensor_parallel_size, settings.num_hosts, settings.host_rank
        if rank >= count:
            raise _wrong("host_rank", rank, f"there are {count} hosts", allowed=(f"0 to {count - 1}",))
        if ranks % count:
            message = f"{ranks} ranks (--tensor-parallel-size) cannot be shared in equal numbers"
            fitting = tuple(str(number) for number in range(1, ranks + 1) if not ranks % number)
            raise _wrong("num_hosts", count, message, allowed=fitting)
        if count == 1:
            return cls(1, 0, ranks, None)
        if settings.leader_address is None:
            raise _wrong("leader_address", None, f"there are {count} hosts", cure="give host 0's host:port to all")
        leader = ListenAddress.parse(settings.leader_address, field="leader_address")
        if leader.port == 0:
            raise _wrong("leader_address", settings.leader_address, "other hosts cannot know a free port")
        return cls(count, rank, ranks // count, leader)

    def ranks(self, host: int) -> range:
        return range(host * self.ranks_each, (host + 1) * self.ranks_each)

    @property
    def local(self) -> range:
        """Ranks of this host."""
        return self.ranks(self.rank)

    @property
    def remote(self) -> range:
        """Ranks of all hosts but host 0."""
        return range(self.ranks_each, self.count * self.ranks_each)


def _wrong(field: str, value: object, why: str, *, allowed: tuple[str, ...] = (), cure: str = "") -> ConfigError:
    message = f"{shown(field)} is {value!r}, but {why}"
    return ConfigError(message, field=field, value=value, allowed=allowed, cure=cure)
