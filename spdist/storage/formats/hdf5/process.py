"""The child process: describe the matrix of one file, then serve its parts.

`spdist.storage.formats.hdf5.reader` starts it with the open file as a descriptor. Its standard input begins with a line
of JSON, the fields of `Settings`. It writes one line of JSON that describes the matrix (`Description.facts`). Then it
answers each line ``NAME START STOP``, or ``NAME START STOP START STOP`` for two dimensions, with a line of JSON and the
bytes that this line announces: numbers of an array, or names of ``rows`` or ``columns`` as lines of text. It ends with
its standard input. An error is a line of JSON too: ``{"error": ...}``.

Nothing outside the file is read: external links, external storage and virtual datasets are refused.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from spdist.foundation.memory import host_memory
from spdist.storage.formats.hdf5.description import Description, RefusedError, Settings

CPU_SECONDS = 2
"""Seconds of CPU time that one answer may take; the system ends the process after that."""

GROWTH_BYTES = 512 << 20
"""Bytes by which the process may grow."""

MATLAB_GROWTH = 8
"""Bytes by which it may grow besides, for each byte of a MATLAB file before 7.3, which SciPy reads whole."""

MATLAB_SPEED = 4 << 20
"""Bytes of such a file for which it has another second."""


def limit_memory(growth: int) -> None:
    """Let the process grow by at most `growth` bytes, if the system says how large it is."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + growth
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        return


def limit_time(seconds: float = CPU_SECONDS) -> None:
    """Let the process end if it computes for longer than this from now on."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def growth_for(size: int) -> int:
    """Return the bytes by which the process may grow for a MATLAB file of this size: at most half of the memory."""
    return min(GROWTH_BYTES + MATLAB_GROWTH * size, max(host_memory() // 2, GROWTH_BYTES))


@contextmanager
def described(raw: BinaryIO, is_matlab5: bool, settings: Settings) -> Iterator[Description]:
    """Yield what describes the matrix; its arrays can be read until the context ends."""
    if is_matlab5:
        from spdist.storage.formats.hdf5 import matlab5

        size = raw.seek(0, os.SEEK_END)
        growth = growth_for(size)
        limit_memory(growth)
        limit_time(CPU_SECONDS + size / MATLAB_SPEED)
        raw.seek(0)
        try:
            yield matlab5.describe(raw, settings)
        except MemoryError:
            raise RefusedError(
                f"files before MATLAB 7.3 are read whole, and this one takes more than {growth >> 20:,} MiB, the limit "
                f"for {size:,} bytes; save it with -v7.3, or as .mtx, which are read in pieces"
            ) from None
        return
    import h5py

    from spdist.storage.formats.hdf5 import anndata, binsparse, matlab73, tenx

    limit_memory(GROWTH_BYTES)
    limit_time()
    raw.seek(0)  # its position is the parent's
    header = raw.read(len(matlab73.HEADER))
    with h5py.File(raw, "r") as file:
        if binsparse.is_binsparse(file, settings.inner):
            yield binsparse.describe(file, settings)
        elif tenx.groups_of(file):
            yield tenx.describe(file, settings)
        elif matlab73.is_matlab(file, header):
            yield matlab73.describe(file, settings)
        else:
            yield anndata.describe(file, settings)


def text_of(names: Any) -> bytes:
    """Return names as text, in which a line break follows each."""
    text = b"".join(name + b"\n" for name in names.tolist())
    if text.count(b"\n") != len(names):
        raise RefusedError("a name has a line break; names must have none")
    return text


def say(content: dict[str, Any], raw: bytes = b"") -> None:
    """Write a line of JSON, and the bytes that it announces."""
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()


def serve(found: Description) -> None:
    """Say what was found, then answer every request."""
    say(found.facts())
    for line in sys.stdin:
        limit_time()
        name, *ends = line.split()
        at = tuple(slice(int(start), int(stop)) for start, stop in zip(ends[::2], ends[1::2], strict=True))
        named = found.names.get(name)
        try:
            answer = found.arrays[name].read(at).tobytes() if named is None else text_of(named.read(at))
        except RefusedError as error:  # the matrix can still be read, without these names
            say({"error": str(error)})
        else:
            say({"bytes": len(answer)}, answer)


def main() -> None:
    """Serve the file of descriptor ``argv[1]``, of the kind ``argv[2]``: hdf5 or matlab5; say what went wrong."""
    try:
        settings = Settings(**json.loads(sys.stdin.readline()))
        with os.fdopen(int(sys.argv[1]), "rb") as raw, described(raw, sys.argv[2] == "matlab5", settings) as found:
            serve(found)
    except RefusedError as error:
        say({"error": str(error)})
    except BrokenPipeError:  # whoever asked is gone
        os._exit(1)
    except Exception as error:  # h5py raises nearly every type that there is
        say({"error": f"damaged or truncated ({type(error).__name__}: {error}); get the file again"})
    sys.stdout.flush()
    os._exit(0)  # the library may crash once more while it closes a damaged file


if __name__ == "__main__":
    main()
