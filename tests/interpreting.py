"""Makes Triton's interpreter cheaper without changing what it computes: what it does anew for each function
it does once for each process.

Before each launch, and before each call of a function by a kernel, Triton looks through its whole language
for what interpreting must replace. After the first time there is nothing left to find within a launch, and
what it replaces is the same in every launch. So the replacements stay. Nothing in these processes compiles a
kernel, which alone would miss what was replaced.

Every sum, difference and product of integers is computed once more in 64 bits, for an assertion that is only
made where kernels are debugged; and each value wraps its shape anew. Neither is done here. What two operands
have to become is not asked where they are alike, and a number beside a tensor is spread once.
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
    seen = dict[int, dict[str, Any]]()  # By identity; what is kept is not made anew at the same place.

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in seen:
            return interpreter._LangPatchScope()
        seen[id(function.__globals__)] = function.__globals__
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
    interpreter._patch_attr = _called_at_once
    _hold_less(interpreter, language)
    _shift_alone(interpreter, language)
    _wrap_less()


def _called_at_once(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """What is built in is called as it is, with who computes, and not through what asks for that."""
    from triton.runtime import interpreter

    inner, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(package, name, call)


def _shift_alone(interpreter: Any, language: Any) -> None:
    """What lies between bfloat16 and float32 is a shift, where no number is too small for its exponent."""
    import numpy

    convert = interpreter._convert_float

    def convert_by_shifts(data: Any, kind: Any, to: Any, rounding: Any) -> Any:
        if rounding is None and kind == language.bfloat16 and to == language.float32:
            wide = data.view(numpy.uint16).astype(numpy.uint32) << 16
            if not _tiny(wide):
                return wide
        elif rounding is None and kind == language.float32 and to == language.bfloat16:
            wide = data.view(numpy.uint32)
            if not _tiny(wide):
                return (wide >> 16).astype(numpy.uint16)
        return convert(data, kind, to, rounding)

    interpreter._convert_float = convert_by_shifts


def _tiny(words: Any) -> bool:
    """Whether any float32 but zeros has an exponent of zero."""
    size = words & 0x7FFFFFFF
    return bool(((size < 0x800000) & (size > 0)).any())


def _hold_less(interpreter: Any, language: Any) -> None:
    """What a value holds is seen to be no wider than its type by its size alone."""
    handle, validate = interpreter.TensorHandle, interpreter._validate_np_data_size
    check, number = handle.__post_init__, interpreter._get_np_dtype

    def hold(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and (dtype.is_ptr() or 8 * data.itemsize > dtype.primitive_bitwidth):
            check(self)

    def compute(self: Any, one: Any, other: Any, operate: Any) -> Any:
        found, kind = operate(one.data, other.data), one.dtype.scalar
        return handle(found if validate(found, kind) else found.astype(number(kind)), kind)

    handle.__init__ = hold
    interpreter.InterpreterBuilder.binary_op = compute


def _broadcast_at_once(core: Any) -> Any:
    """What two operands become that have a shape, or of which one has: the same as by Triton's own steps."""
    import numpy
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    by_steps, handle = TritonSemantic.broadcast_impl_value, interpreter.TensorHandle
    both = dict[tuple[int, int], tuple[list[int], list[bool]] | None]()  # By shapes, which are kept.

    def common(one: Any, other: Any) -> tuple[list[int], list[bool]] | None:
        """The shape of both, and which of them has another; None where Triton takes more steps."""
        key = id(one.shape), id(other.shape)
        if key not in both:
            mine, its = list(one.type.shape), list(other.type.shape)
            fit = len(mine) == len(its) and all(a == b or 1 in (a, b) for a, b in zip(mine, its, strict=True))
            shape = list(map(max, mine, its))
            both[key] = (shape, [shape != mine, shape != its]) if fit else None
        return both[key]

    def spread(self: Any, one: Any, shape: list[int]) -> Any:
        data = numpy.broadcast_to(one.handle.data, shape)
        return self.tensor(handle(data, one.handle.dtype.scalar), core.block_type(one.type.scalar, shape))

    def filled(self: Any, one: Any, like: Any) -> Any:
        kind, its = like.type.with_element_ty(one.type.scalar), one.handle.dtype
        data = numpy.full(kind.shape.values, one.handle.data, dtype=interpreter._get_np_dtype(its))
        return self.tensor(handle(data, its.scalar), kind)

    def broadcast(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        mine, its = one.type.is_block(), other.type.is_block()
        if mine and its:
            if (found := common(one, other)) is not None:
                shape, changes = found
                one, other = (
                    spread(self, each, shape) if change else each
                    for each, change in zip((one, other), changes, strict=True)
                )
                return one, other
        elif mine and not other.handle.dtype.is_block():
            return one, filled(self, other, one)
        elif its and not one.handle.dtype.is_block():
            return filled(self, one, other), other
        return by_steps(self, one, other)  # type: ignore[no-any-return]

    return broadcast


def _wrap_less() -> None:
    from triton import language
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    overflow, broadcast = TritonSemantic.binary_op_sanitize_overflow_impl, _broadcast_at_once(core)
    block, with_element = core.block_type.__init__, core.block_type.with_element_ty
    unwrap, alike = core._unwrap_if_constexpr, core.dtype.__eq__
    shapes, blocks = dict[tuple[int, ...], tuple[Any, Any]](), dict[tuple[Any, ...], tuple[Any, ...]]()
    types = dict[tuple[int, str], Any]()
    wrapped_already = frozenset({int, float, bool, str, core.tensor, core.dtype, type(None)})

    def overflow_if_asserted(self: Any, *of: Any) -> None:
        if self.builder.options.debug:
            overflow(self, *of)

    def broadcast_if_unlike(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        """What has one shape already, as most has, is taken as it is. Shapes that are alike are one object;
        see `make_tensor`."""
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    def shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        if shape not in shapes:
            shapes[shape] = (
                core.constexpr(math.prod(shape)),
                core.tuple([core.constexpr(size) for size in shape]),
            )
        return shapes[shape]

    scalar = shape_of(())

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.numel, self.shape = kind.of_tensors if kind.is_block() else scalar
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(shape.values if type(shape) is core.tuple else shape)
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name, shape_of(tuple(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.of_tensors = blocks[key]

    def with_element_once(self: Any, element_ty: Any) -> Any:
        """A type does not change. Pointers are told apart by more than their names."""
        if element_ty.is_ptr():
            return with_element(self, element_ty)
        key = id(self.of_tensors), element_ty.name  # Which is kept in `shapes`.
        if (found := types.get(key)) is None:
            found = types[key] = with_element(self, element_ty)
        return found

    def unwrap_if_wrapped(of: Any) -> Any:
        return of if type(of) in wrapped_already else unwrap(of)

    def same_type(self: Any, other: Any) -> bool:
        return self is other or alike(self, other)

    TritonSemantic.binary_op_sanitize_overflow_impl = overflow_if_asserted
    TritonSemantic.broadcast_impl_value = broadcast_if_unlike
    core.tensor.__init__, core.block_type.__init__ = make_tensor, make_block
    core.block_type.with_element_ty, core.dtype.__eq__ = with_element_once, same_type
    core._unwrap_if_constexpr = language._unwrap_if_constexpr = unwrap_if_wrapped
    _ask_less(TritonSemantic, core)


_KEPT = 1000
"""Numbers that are kept spread over a shape, each at most `_WIDE` times."""
_WIDE = 1 << 12


def _ask_less(semantic: Any, core: Any) -> None:
    check = semantic.binary_op_type_checking_impl
    plain = frozenset((*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES, "fp32", "fp64"))
    spread = dict[tuple[Any, ...], Any]()

    def check_if_unlike(
        self: Any, one: Any, other: Any, of_one: bool = False, of_other: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Two tensors of one shape and one plain type stay as they are. What a number beside a tensor becomes
        is kept, where the tensor stays as it is."""
        if type(one) is not core.tensor or one.dtype.name not in plain:
            return check(self, one, other, of_one, of_other, arithmetic_check, div_or_mod)  # type: ignore[no-any-return]
        if type(other) is core.tensor:
            if one.shape is other.shape and one.dtype.name == other.dtype.name:
                return one, other
        elif type(other) in (int, float, bool) and one.numel.value <= _WIDE:
            key = type(other), other, one.dtype.name, id(one.shape), arithmetic_check, div_or_mod
            if (found := spread.get(key)) is not None:
                return one, found
            same, found = check(self, one, other, of_one, of_other, arithmetic_check, div_or_mod)
            if same is one:
                found.handle.data.flags.writeable = False
                if len(spread) >= _KEPT:
                    spread.clear()
                spread[key] = found
            return same, found
        return check(self, one, other, of_one, of_other, arithmetic_check, div_or_mod)  # type: ignore[no-any-return]

    semantic.binary_op_type_checking_impl = check_if_unlike
