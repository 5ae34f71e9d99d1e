"""Makes Triton's interpreter cheaper without changing what it computes: what it does anew for each function it does once for each process.

Before each launch, and before each call of a function by a kernel, Triton looks through its whole language for what interpreting must
replace. After the first time there is nothing left to find within a launch, and what it replaces is the same in every launch. So the
replacements stay. Nothing in these processes compiles a kernel, which alone would miss what was replaced.
"""

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
