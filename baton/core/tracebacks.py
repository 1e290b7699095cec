"""Drops the tracebacks of an error that has been dealt with.

An error, the traceback it carries and the frames in that traceback often refer to each other: a task that failed is a
local of the frame that its error passed through. What these frames hold then stays until Python's collector comes by,
and for a gRPC call that is an open connection. Without tracebacks all of it goes at once.
"""


def drop_tracebacks(error: BaseException) -> None:
    """Drops the traceback of an error, of its causes and contexts, and of the errors in a group.

    Errors that are shared with other callers lose theirs too, so log an unexpected error first.
    """
    found: list[BaseException | None] = [error]
    seen: set[int] = set()
    while found:
        each = found.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        found += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            found += each.exceptions
