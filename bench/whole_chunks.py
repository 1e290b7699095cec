"""`python -m bench.whole_chunks`: a prefill node that sends a chunk's KV only when all of its layers are computed."""

from baton.settings.internal import set_internal_defaults
from baton.settings.node_config import PrefillSettings
from prefill_node.__main__ import main

if __name__ == "__main__":
    set_internal_defaults({"overlap_layers": False}, PrefillSettings)
    main()
