"""Engine limits for tests that care about one of them."""

from typing import Any

from baton.engine.request import EngineLimits


def limits(**given: Any) -> EngineLimits:
    others = {"max_batch_tokens": 256, "max_batch_requests": 64, "max_waiting": 256, "prefix_cache": True}
    return EngineLimits(**{**others, **given})
