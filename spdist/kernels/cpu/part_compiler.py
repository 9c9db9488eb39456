"""How Numba compiles functions that only kernels call: they are optimised once, as a part of the kernel.

Numba optimises each function with all that it calls, and makes machine code of it. A kernel of many parts, each called
by the next, would so be optimised at every step again. A part is only linked into what calls it: LLVM optimises it
once for each kernel, together with the kernel.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering


class PartLibrary(JITCodeLibrary):
    """The code of a part, for kernels to link in."""

    def _optimize_final_module(self) -> None:
        """Leave it to the kernel's library."""

    def _finalize_final_module(self) -> None:
        """Make no machine code."""
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    """Makes the LLVM code of a part, and lets other functions call it."""

    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        """Run this step of a compilation."""
        codegen, name = state.targetctx.codegen(), state.func_id.func_qualname
        state.library = PartLibrary(codegen, name)  # type: ignore[no-untyped-call]
        state.flags.no_compile = True
        super().run_pass(state)  # type: ignore[no-untyped-call]
        callee = object()  # by which callers find the part; there is nothing that Python could call
        state.targetctx.insert_user_function(callee, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=callee)
        return True


class PartCompiler(Compiler):
    """The steps of Numba's compiler, but the lowering is a part's."""

    def define_pipelines(self) -> list[PassManager]:
        """Return the one sequence of steps."""
        steps = PassManager("part")
        for numbas in super().define_pipelines():  # type: ignore[no-untyped-call]
            steps.passes += [(_PartLowering if one is NativeLowering else one, what) for one, what in numbas.passes]
        steps.finalize()
        return [steps]
