"""Makes Triton's interpreter cheaper without changing what it computes: what it does anew for each function
it does once for each process.

Before each launch, and before each call of a function by a kernel, Triton looks through its whole language
for what interpreting must replace. After the first time there is nothing left to find within a launch, and
what it replaces is the same in every launch. So the replacements stay. Nothing in these processes compiles a
kernel, which alone would miss what was replaced.

Every sum, difference and product of integers is computed once more in 64 bits, for an assertion that is only
made where kernels are debugged; and each value wraps its shape anew. Neither is done here.
"""

import math
from functools import cache
from typing import Any


@cache
def install() -> None:
    """From now on, for as long as the process lives. Where kernels are interpreted: this imports Triton."""
    from triton import language
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set[tuple[bool, bool]]()

    def patch_once(function: Any) -> Any:
        values = function.__globals__.values()
        used = any(one is language for one in values), any(one is language.core for one in values)
        if used not in done:
            done.add(used)
            patch(function)  # What it returns would undo it.
        return interpreter._LangPatchScope()

    number, known = interpreter._get_np_dtype, dict[str, Any]()

    def number_once(kind: Any) -> Any:
        """NumPy's type for one of Triton's, which builds a table of all at each call."""
        if isinstance(kind, language.block_type):
            kind = kind.element_ty
        name = kind.name
        if name not in known:
            known[name] = number(kind)
        return known[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, number_once
    _wrap_less()


def _wrap_less() -> None:
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    overflow, broadcast = TritonSemantic.binary_op_sanitize_overflow_impl, TritonSemantic.broadcast_impl_value
    block = core.block_type.__init__
    shapes, blocks = dict[tuple[int, ...], tuple[Any, Any]](), dict[tuple[Any, ...], tuple[Any, Any, Any]]()

    def overflow_if_asserted(self: Any, *of: Any) -> None:
        if self.builder.options.debug:
            overflow(self, *of)

    def broadcast_if_unlike(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        """What has one shape already, as most has, is taken as it is. Shapes that are alike are one object;
        see `make_tensor`."""
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        shape = tuple(kind.shape) if kind.is_block() else ()
        if shape not in shapes:
            shapes[shape] = (
                core.constexpr(math.prod(shape)),
                core.tuple([core.constexpr(size) for size in shape]),
            )
        self.numel, self.shape = shapes[shape]
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(core._unwrap_if_constexpr(size) for size in shape))
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    TritonSemantic.binary_op_sanitize_overflow_impl = overflow_if_asserted
    TritonSemantic.broadcast_impl_value = broadcast_if_unlike
    core.tensor.__init__, core.block_type.__init__ = make_tensor, make_block
