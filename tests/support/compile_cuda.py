"""Compile a .cu file through NVRTC, in a process of its own: NVRTC's C++ library must not mix with SciPy's."""

from __future__ import annotations

from spdist.kernels.cuda.module import FOLDER, options


def compile_log(file: str, names: list[str], arch: str, defines: tuple[str, ...] = ()) -> tuple[bool, str]:
    """Return whether `file` compiles for `arch` with these name expressions, and the compiler's messages.

    For ``sm_90`` machine code is made, which finds too much shared memory and instructions that do not exist as well.
    It is not optimised: that would take twenty times as long. For ``compute_90`` templates are instantiated and
    checked.
    """
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram((FOLDER / file).read_bytes(), file.encode(), 0, [], [])
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    flags = [option.encode() for option in (f"--gpu-architecture={arch}", *options(file), *defines)]
    flags.append(b"--fdevice-syntax-only" if arch.startswith("compute_") else b"--Ofast-compile=max")
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode(errors="replace")
