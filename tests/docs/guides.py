"""Pages whose blocks are files of a copy of the source, tested apart from the others."""

GUIDES: tuple[str, ...] = ()
