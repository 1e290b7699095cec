"""Movers between the cache and staging slots: `mover` is the Protocol, `table` chooses the one for a device."""
