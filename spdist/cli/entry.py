"""The command of a process: read its arguments, run one command, report errors, end."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from spdist.cli.applications import add_application_verbs
from spdist.cli.interrupts import raise_dropped_interrupts, say_that_it_stops
from spdist.cli.matrices import add_matrix_verbs
from spdist.cli.options import Parser, show_gpus
from spdist.cli.products import add_product_verbs
from spdist.cli.verbs import Verbs
from spdist.errors import InputError, SpdistError, install, one_line
from spdist.foundation import phases
from spdist.foundation.settings import check_numba, unexpected
from spdist.foundation.standard_output import drop_unread, drop_unwritable
from spdist.shown import printable, remember_place

EXAMPLES = """examples:
  spdist import A.mtx A.zarr
  spdist plan A.zarr A.zarr --memory-limit 512MiB
  spdist multiply A.zarr A.zarr C.zarr --memory-limit 512MiB --verify
"""

LINE = 2000
"""Maximum characters of an error message."""

GARBAGE = 100_000
"""New objects after which Python's garbage collector runs in a command."""
RESUMABLE = ("multiply", "similarity", "cooccurrence", "shortest-paths", "markov-clustering")
"""Commands that can resume."""
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""`errno` values that repeating a command would give again."""
ADDRESS_SPACE = 2 << 30
"""Minimum address space in bytes: with 1.1 GB the libraries and their threads ended without an error, or hung."""


class _Clean(logging.Formatter):
    """Formats what libraries log to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message and its traceback without secrets."""
        return printable(super().format(record))


def _show_traceback(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Print the traceback of an unexpected error, without secrets."""
    print(printable("".join(traceback.format_exception(kind, error, at))), end="", file=sys.stderr)


class _Warnings(logging.Handler):
    """Shows warnings of the package as lines on stderr, also while a progress bar is there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        from spdist.cli import console

        show = console.notice if getattr(record, "notice", False) else console.warning
        show(record.getMessage())


def show_warnings() -> None:
    """Show warnings of the package; Dask's warnings that matter are repeated by the package."""
    logger = logging.getLogger("spdist")
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings(logging.WARNING))


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command line; `command` is the verb that was given, if any."""
    parser = Parser(
        prog="spdist",
        description="Multiply sparse matrices larger than memory: planned, distributed, resumable, verified.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = Verbs(parser)
    add_matrix_verbs(verbs, command)
    add_product_verbs(verbs)
    add_application_verbs(verbs)
    text = 'print what completes commands and options in a shell: eval "$(spdist completion bash)"'
    sub = verbs.add("completion", _completion, text)
    sub.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")
    return parser


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise InputError(f"completion in shells needs the package shtab: {install('completion')}") from None
    print(shtab.complete(_parser(None), args.shell))
    return 0


def _check_address_space() -> None:
    """Raise if the address space is smaller than the libraries need: some end the process when it runs out."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE:
        raise InputError(
            f"the limit of address space is {limit:,} bytes, and spdist's libraries need {ADDRESS_SPACE:,}: raise it "
            f"(ulimit -v unlimited) and bound memory by --memory-limit"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 if it is done, 1 if the job failed, 2 if the input is wrong.

    By default `argv` is the arguments of the process, and phases count from the start of the process.
    """
    with phases.clocked(phases.process_begin() if argv is None else None):
        return _main(list(sys.argv[1:] if argv is None else argv))


def _open_standard_files() -> None:
    """Open the null device in place of stdin, stdout and stderr that are closed, as in jobs of some schedulers.

    Otherwise the next opened file, perhaps of a matrix, would get the number of stderr and receive its output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def command() -> NoReturn:
    """Run the command of this process and end the process: the entry point of ``spdist``."""
    _open_standard_files()
    sys.excepthook = _show_traceback
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Clean())
    gc.set_threshold(GARBAGE)  # modules stay loaded: searching them for garbage took a tenth of a small command
    # No product calls BLAS, whose threads spin for a while once NumPy and SciPy are loaded: 2 CPU seconds on 16 cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = main()
    except SystemExit as end:  # of --help
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End the process at once; shutting the interpreter down takes a second once Dask and Numba are loaded.

    `code`: exit code.
    """
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if others:  # Python waits for them
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        if not drop_unread(error) and (problem := drop_unwritable()):
            with contextlib.suppress(OSError):
                sys.stderr.write("" if code else f"spdist: standard output cannot be written ({problem})\n")
        code = code or 1
    atexit._run_exitfuncs()
    os._exit(code)


def _main(argv: list[str]) -> int:
    """Run one command."""
    for word in argv:
        remember_place(word)
    command = next((word for word in argv if not word.startswith("-")), None)
    again = "; continue with --resume" if command in RESUMABLE else ""
    args = argparse.Namespace(made=None)
    try:
        code = _run(_parser(command), argv, args)
        sys.stdout.flush()
        return code
    except SpdistError as error:
        return _failed(argv, error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _failed(argv, error, f"interrupted{again}", 1)
    except MemoryError as error:
        return _failed(argv, error, f"{one_line(str(error) or 'not enough memory', LINE)}{again}", 1)
    except OSError as error:
        if drop_unread(error):
            return 1
        text = one_line(str(error) or type(error).__name__, LINE)
        if error.filename is None and (problem := drop_unwritable()):
            text = f"standard output cannot be written ({problem})"
            again = again if args.made is None else f"; {args.made} is whole, and only what was to be printed is lost"
        return _failed(argv, error, text + ("" if error.errno in DENIED else again), 1)
    except SystemExit:
        raise
    except BaseException as error:  # from a library, perhaps in Rust, perhaps because of its settings
        return _failed(argv, error, unexpected(error), 1)


def _run(parser: argparse.ArgumentParser, argv: list[str], args: argparse.Namespace) -> int:
    """Read the arguments into `args` and run the command, which sets `args.made` to its output."""
    parser.parse_args(argv, args)
    if args.version:
        from spdist import __version__

        print(__version__)
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    check_numba()
    if getattr(args, "gpus", None):
        show_gpus(args.gpus)
    show_warnings()
    raise_dropped_interrupts()
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # from Zarr, after an interrupt
    signal.signal(signal.SIGTERM, say_that_it_stops)  # a batch system's signal leaves a C that can be resumed
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless a shell ignores it
        signal.signal(signal.SIGINT, say_that_it_stops)
    if args.command in (*RESUMABLE, "reduce", "triangles"):
        _check_address_space()
    return int(args.run(args))


def _failed(argv: list[str], error: BaseException, text: str, code: int) -> int:
    """Report why a command failed: a line on stderr, and with ``--json`` an object on stdout."""
    text = one_line(text, LINE)
    print(f"spdist: {text}", file=sys.stderr)
    if "--json" in argv:
        with contextlib.suppress(OSError):  # standard output is full
            print(json.dumps({"error": text, "kind": type(error).__name__, "exit_code": code}), flush=True)
    return code
