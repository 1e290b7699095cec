"""Makes Triton's interpreter faster without changing what it computes.

The interpreter replaces the functions of `triton.language` for each launch, and looks for them again in each call of a
device function within it, where all are replaced already: a third of the time of a kernel that calls many. It also
builds its table of dtypes for each operation. Each sum, difference and product of integers is computed once more to
find overflows, a quarter of the time, and the finding is dropped, because the interpreter's options have no `debug`.
Shapes are checked, wrapped and compared anew for each tensor, element by element.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
from triton.language import core, semantic
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

    assert not interpreter.InterpreterOptions.debug, "overflows are reported"
    _reuse_shapes()
    _compare_identities()
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = patch
    interpreter._get_np_dtype = dtype_of


def _reuse_shapes() -> None:
    """Lets blocks of one shape share its tuple, which nothing changes. A shape is checked when it is new."""
    tensor_init: Callable[[Any], None] = core.base_value.__init__
    whole: Callable[..., None] = core.block_type.__init__

    @cache
    def block_shape(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        """The shape of a block's type, its number of elements, and its text."""
        made = core.block_type.__new__(core.block_type)
        whole(made, core.int32, list(sizes))
        return made.shape, made.numel, str(made.shape)

    @cache
    def tensor_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        """The shape of a tensor, and its number of elements."""
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_block_type(block: Any, element: Any, shape: Iterable[Any]) -> None:
        sizes = tuple(shape)
        if not all(type(size) is int for size in sizes):
            whole(block, element, shape)
            return
        block.element_ty = element
        block.shape, block.numel, text = block_shape(sizes)
        block.name = f"<{text}, {element}>"

    def init_tensor(tensor: Any, handle: object, kind: Any) -> None:
        tensor_init(tensor)
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = tensor_shape(tuple(kind.shape) if kind.is_block() else ())

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor


def _compare_identities() -> None:
    """Looks at what two values are before it looks at what they have. `_reuse_shapes` lets equal shapes be one."""
    unwrap_any: Callable[[Any], Any] = core._unwrap_if_constexpr
    equal: Callable[[Any, Any], bool] = core.dtype.__eq__
    broadcast_any: Callable[[Any, Any, Any], tuple[Any, Any]] = semantic.TritonSemantic.broadcast_impl_value
    plain = frozenset({int, float, bool, core.dtype, core.block_type, core.pointer_type, core.tensor})

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap_any(value)

    def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        first, second = left.type, right.type
        if first.is_block() and second.is_block() and first.shape is second.shape:
            return left, right
        return broadcast_any(self, left, right)

    core._unwrap_if_constexpr = unwrap
    core.dtype.__eq__ = lambda first, second: first is second or equal(first, second)
    semantic.TritonSemantic.broadcast_impl_value = broadcast


def _is_language(value: object) -> bool:
    return value is language or value is language.core
