"""KV cache layouts: the order of a cache's axes in memory, their names, and a node's choice. Pure values; no torch.

Axes: L layer, K key/value pair, B block, N token in block, H kv head, C channel. All code indexes in the logical order
L K B N H C; a layout is only the order in memory, outermost first. MLA keeps axes K and H at size 1, so that one gather
serves every cache.
"""

from enum import Enum

from baton.core.errors import ConfigError

LOGICAL_AXES = "LKBNHC"


class KVCacheLayout(Enum):
    """A permutation of the logical axes, outermost first, under the name that users know."""

    NHD = ("NHD", "LKBNHC")
    HND = ("HND", "LKBHNC")
    BLNHC = ("BLNHC", "BLKNHC")  # all layers of a block adjacent
    BLHNC = ("BLHNC", "BLKHNC")
    LBNC = ("LBNC", "LKBNHC")  # MLA
    BLNC = ("BLNC", "BLKNHC")  # MLA, all layers of a block adjacent

    def __init__(self, label: str, axes: str) -> None:
        self.label = label
        self.axes = axes

    @property
    def memory_order(self) -> tuple[int, ...]:
        """Indices into the logical axes, outermost first: `logical.permute(memory_order)` is contiguous."""
        return tuple(LOGICAL_AXES.index(axis) for axis in self.axes)


GQA_LAYOUTS = (KVCacheLayout.NHD, KVCacheLayout.HND, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)
MLA_LAYOUTS = (KVCacheLayout.LBNC, KVCacheLayout.BLNC)

# MLA has no head axis: for it, names that differ only in that axis mean the same layout, and the reverse.
_FOR_MLA = {
    KVCacheLayout.NHD: KVCacheLayout.LBNC,
    KVCacheLayout.HND: KVCacheLayout.LBNC,
    KVCacheLayout.BLNHC: KVCacheLayout.BLNC,
    KVCacheLayout.BLHNC: KVCacheLayout.BLNC,
}
_FOR_GQA = {KVCacheLayout.LBNC: KVCacheLayout.NHD, KVCacheLayout.BLNC: KVCacheLayout.BLNHC}


def parse_layout(name: str, *, mla: bool) -> KVCacheLayout:
    """The layout that `name` means for a cache of that kind; case does not matter.

    Raises:
        ConfigError: no such layout; lists the known ones.
    """
    try:
        layout = KVCacheLayout[name.strip().upper()]
    except KeyError:
        known = tuple(layout.name for layout in KVCacheLayout)
        raise ConfigError(
            f"BATON_KV_CACHE_LAYOUT (--kv-cache-layout) is {name!r}", field="kv_cache_layout", value=name, allowed=known
        ) from None
    return (_FOR_MLA if mla else _FOR_GQA).get(layout, layout)


class LayoutChoice:
    """One node's layout and where it came from.

    Precedence: programmatic override, then the setting's, then the transport's or backend's preference, then NHD.
    """

    def __init__(self, *, mla: bool, setting: str | None = None, preferred: KVCacheLayout | None = None) -> None:
        self._mla = mla
        self._setting = setting
        self._preferred = preferred
        self._override: KVCacheLayout | None = None

    def set_kv_cache_layout(self, layout: KVCacheLayout | str | None) -> None:
        """Overrides the layout from the program; None removes the override. Library API."""
        name = layout.name if isinstance(layout, KVCacheLayout) else layout
        self._override = None if name is None else parse_layout(name, mla=self._mla)

    def get_kv_cache_layout(self) -> KVCacheLayout:
        return self._resolve()[0]

    @property
    def source(self) -> str:
        """The source of the choice, for logs: "override", "setting", "preferred" or "default"."""
        return self._resolve()[1]

    def _resolve(self) -> tuple[KVCacheLayout, str]:
        if self._override is not None:
            return self._override, "override"
        if self._setting:
            return parse_layout(self._setting, mla=self._mla), "setting"
        if self._preferred is not None:
            return parse_layout(self._preferred.name, mla=self._mla), "preferred"
        return parse_layout("NHD", mla=self._mla), "default"
