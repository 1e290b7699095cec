"""Python's garbage collector in processes that serve: it stops all threads while it runs, so it should run rarely."""

import gc

# The defaults are 700, 10 and 10. With those, a gateway with 512 streams spent a fifth of its time collecting and
# paused the streams for 50 to 140 ms, and full collections paused a decode node for 20 to 40 ms. Requests leave hardly
# any cycles (`tests/unit/gateway/test_garbage.py`).
_THRESHOLDS = (50_000, 5, 10)


def keep_collections_rare() -> None:
    """To be called once the process is ready to serve. What exists then is taken to stay, and is never scanned again: a
    full collection of a node walked 225,000 such objects and took 0.2 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
