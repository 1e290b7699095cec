"""Finds, on the device, which rows of a step lead on: those with the last draw of their request that is kept.

A row with drafts is computed as several rows (`unfolded`). A draw is kept if all drafts before it are right, so the
last one that is kept is followed by no right draft. The host does not know which one it is when it queues the passes
of the layer that drafts.

Suffixes: S row that is sampled.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.device.unfolded import Unfolded

_NONE = -1


def no_links(count: int) -> NDArray[np.int64]:
    """Links of rows that all lead on, [3, count]."""
    return np.stack((np.full(count, _NONE), np.arange(count), np.full(count, _NONE)))


def draft_links(unfolded: Unfolded, order: Mapping[int, int], count: int) -> NDArray[np.int64] | None:
    """Links [3,S] between the rows of the same request: the row before a draft's; the first draft of its request; and
    the draft after each row. The first and the last are -1 where there is none. Returns None if the step has no drafts.

    Args:
        order: the place in S of each row of the step; rows that are not sampled may be missing.
        count: length of S.
    """
    groups = [each for each in zip(unfolded.places, unfolded.drafts, strict=True) if len(each[1])]
    if not groups:
        return None
    links_3S = no_links(count)
    before_S, first_S, draft_S = links_3S
    for places, drafts in groups:
        rows = [order[place] for place in places]
        later = rows[1:]
        assert later == [*range(later[0], later[0] + len(later))], "drafts of a request lie side by side"
        before_S[later], first_S[later], draft_S[rows[:-1]] = rows[:-1], later[0], drafts
    return links_3S


def find_leads(tokens_S: Tensor, links_3S: Tensor) -> Tensor:
    """Whether each row leads on, [S] bool. Reads nothing on the host.

    Args:
        tokens_S: int32, what each row has drawn.
        links_3S: as `draft_links` returns them.
    """
    before_S, first_S, draft_S = links_3S
    right_S = (tokens_S == draft_S) & (draft_S >= 0)
    follows_wrong_S = (before_S >= 0) & ~right_S.index_select(0, before_S.clamp(min=0))
    # How many rows up to each one follow a wrong draft: none between the request's first draft and a draw that is kept.
    up_to_S = follows_wrong_S.to(torch.int64).cumsum(0)
    before_first_S = (up_to_S - follows_wrong_S.to(torch.int64)).index_select(0, first_S)
    leads_S: Tensor = (up_to_S == before_first_S) & ~right_S
    return leads_S
