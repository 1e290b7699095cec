"""ucxx's real bindings with one chosen call that raises once, as ucxx does when a peer dies or resources run out."""

from typing import Any

# Attributes that ask UCX something when they are read.
_ASKED = ("address", "alive", "completed", "epoll_file_descriptor", "handle")


class FaultyUcxx:
    """Has the two modules that `UcxTransport` uses.

    Attributes:
        called: the names of all calls so far.
        fails_next: the call with this name raises when it is made next.
    """

    def __init__(self) -> None:
        from ucxx import _lib
        from ucxx._lib import arr, libucxx  # noqa: F401  (makes them attributes of `_lib`)

        self.called: set[str] = set()
        self.fails_next = ""
        self.libucxx = _Watched(_lib.libucxx, self)
        self.arr = _Watched(_lib.arr, self)

    def note(self, name: str) -> None:
        self.called.add(name)
        if name == self.fails_next:
            self.fails_next = ""
            error = type("UCXXInjectedError", (Exception,), {})  # ucxx, too, makes its exception types at run time
            raise error(f"{name} failed")


class _Watched:
    """A module, class or object of ucxx. What it returns is watched, too."""

    def __init__(self, real: Any, faults: FaultyUcxx) -> None:
        self._real = real
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED:
            self._faults.note(name)
        return self._watched(getattr(self._real, name))

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._faults.note(self._real.__name__)
        return self._watched(
            self._real(*(each._real if isinstance(each, _Watched) else each for each in args), **options)
        )

    def _watched(self, value: Any) -> Any:
        belongs = type(value).__module__.startswith(("ucxx", "builtins")) and not isinstance(value, _PLAIN)
        return _Watched(value, self._faults) if belongs or callable(value) else value


_PLAIN = (int, float, str, bytes, bool, memoryview, type(None))
