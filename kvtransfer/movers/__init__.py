"""Movers of KV between the cache and staging slots: `mover` is the Protocol, `table` chooses one for a device."""
