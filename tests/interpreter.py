"""Makes Triton's interpreter faster without changing what it computes.

The interpreter replaces the functions of `triton.language` for each launch, and looks for them again in each call of a
device function within it, where all are replaced already: a third of the time of a kernel that calls many. It also
builds its table of dtypes for each operation.
"""

from collections.abc import Callable, Hashable
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


def speed_up() -> None:
    """Applies to all kernels of this process."""
    patch_whole: Callable[[Any], Any] = interpreter._patch_lang
    find_dtype: Callable[[Any], object] = interpreter._get_np_dtype

    @cache
    def builtins_of(namespace: ModuleType | type) -> tuple[str, ...]:
        """Of a namespace that no launch has replaced. `cache` keeps what the first launch finds."""
        return tuple(name for name in dir(namespace) if language.core.is_builtin(getattr(namespace, name, None)))

    def patch_builtins(namespace: ModuleType | type, builder: object, scope: object) -> None:
        for name in builtins_of(namespace):
            interpreter._patch_attr(namespace, name, getattr(namespace, name), builder, scope)

    @cache
    def languages_of(function: Any) -> tuple[ModuleType, ...]:
        """The names of `triton.language` that the function's module has, as the interpreter finds them."""
        return tuple({id(each): each for each in function.__globals__.values() if _is_language(each)}.values())

    def patch(function: Any) -> object:
        languages = languages_of(function)
        if languages and not any(language.core.is_builtin(each.load) for each in languages):
            return interpreter._LangPatchScope()  # within a launch
        return patch_whole(function)

    @cache
    def dtype_of_scalar(scalar: Hashable) -> object:
        return find_dtype(scalar)

    def dtype_of(kind: Any) -> object:
        """Pointers and blocks are not hashable."""
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return find_dtype(element) if isinstance(element, language.pointer_type) else dtype_of_scalar(element)

    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = patch
    interpreter._get_np_dtype = dtype_of


def _is_language(value: object) -> bool:
    return value is language or value is language.core
