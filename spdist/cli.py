"""The command line: arguments in, one call of the API, one table or one JSON object out; no logic."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from spdist import phases
from spdist.cli_options import (
    Parser,
    add_generate,
    add_multiply_options,
    add_overwrite,
    add_plan_options,
    add_product_options,
    add_reduce_options,
    add_warm_up_options,
    block_size,
)
from spdist.errors import InputError, SpdistError, one_line
from spdist.interrupts import raise_dropped_interrupts, say_that_it_stops

if TYPE_CHECKING:
    from distributed import Security

    from spdist.options import ProductKeywords
    from spdist.storage.matrix import StoredMatrix

EXAMPLES = """examples:
  spdist import A.mtx A.zarr
  spdist plan A.zarr A.zarr --memory-limit 512MiB
  spdist multiply A.zarr A.zarr C.zarr --memory-limit 512MiB --verify
"""

LINE = 2000
"""Characters of an error message at most."""

GARBAGE = 100_000
"""New objects after which the process of a command searches for garbage."""
ADDRESS_SPACE = 2 << 30
"""Bytes of address space for the libraries and their threads; a product with 1.1 GB ended without a line, or hung."""

VECTORS = ("row_sums", "column_sums", "row_nnz")
"""Reductions to a value for each row or column of C."""


class _Warnings(logging.Handler):
    """Shows warnings of the package as lines on stderr, also while a progress bar is there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        from spdist import console

        show = console.notice if getattr(record, "notice", False) else console.warning
        show(record.getMessage())


def _show_warnings() -> None:
    """Show the package's warnings, and not Dask's: what matters of these is an error or a warning of the package."""
    logger = logging.getLogger("spdist")
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings(logging.WARNING))


# -- commands ----------------------------------------------------------------------------------------------------------


def _import(args: argparse.Namespace) -> int:
    from spdist import console
    from spdist.storage.import_export import import_matrix

    with console.transfer_bar(f"importing {args.source}", quiet=args.json) as bar:
        size = args.block_size
        matrix = import_matrix(
            args.source, args.target, **_mode(args), block_size=size, labels=args.labels, progress=bar
        )
    return _show_matrix(matrix, args)


def _export(args: argparse.Namespace) -> int:
    from spdist import console
    from spdist.storage.import_export import export_matrix

    with console.transfer_bar(f"exporting {args.source}", quiet=args.json) as bar:
        export_matrix(args.source, args.target, format=args.format, **_mode(args), progress=bar)
    if not args.json:
        console.line(f"wrote {args.target}")
    return _print_json({"target": args.target}, args)


def _generate(args: argparse.Namespace) -> int:
    from spdist import console
    from spdist.storage.generators import KINDS, generate

    names = {name for kind in KINDS.values() for name in kind.parameters}
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    with console.transfer_bar(f"generating {args.kind}", quiet=args.json) as bar:
        matrix = generate(
            args.kind, args.target, **_mode(args), progress=bar, dtype=args.dtype, seed=args.seed, **given
        )
    return _show_matrix(matrix, args)


def _transpose(args: argparse.Namespace) -> int:
    from spdist import console
    from spdist.storage.transpose import transpose

    with console.transfer_bar(f"transposing {args.source}", quiet=args.json) as bar:
        matrix = transpose(args.source, args.target, overwrite=args.overwrite, steal=args.steal, progress=bar)
    return _show_matrix(matrix, args)


def _symmetrize(args: argparse.Namespace) -> int:
    from spdist import console
    from spdist.storage.transpose import symmetrize

    with console.transfer_bar(f"mirroring {args.source}", quiet=args.json) as bar:
        matrix = symmetrize(args.source, args.target, conjugate=args.conjugate, **_mode(args), progress=bar)
    return _show_matrix(matrix, args)


def _info(args: argparse.Namespace) -> int:
    from spdist import api

    facts = api.info(args.matrix)
    if getattr(args, "spy", None) is not None:
        from spdist.storage.atomic_replace import staged_file

        with staged_file(args.spy, overwrite=True) as place:
            place.write_text(api.spy(args.matrix).to_svg())
        facts["picture"] = args.spy
    if not args.json:
        from spdist import console

        console.matrix_table(facts)
    return _print_json(facts, args)


def _status(args: argparse.Namespace) -> int:
    from spdist import api

    facts = api.status(args.target)
    if not args.json:
        from spdist import console

        console.matrix_table(facts)
    return _print_json(facts, args)


def _report(args: argparse.Namespace) -> int:
    from spdist.jobs.reports.run_report import write_report

    write_report(args.records, args.file)
    return _print_json({"report": args.file, "runs": len(args.records)}, args)


def _check(args: argparse.Namespace) -> int:
    from spdist import api, console

    with console.transfer_bar(f"checking {args.matrix}", quiet=args.json) as bar:
        found = api.check(args.matrix, progress=bar)
    if not args.json:
        console.check_lines(found)
    _print_json(found.to_json(), args)
    return 0 if found.ok else 1


def _show_matrix(matrix: StoredMatrix, args: argparse.Namespace) -> int:
    args.matrix = matrix.url
    return _info(args)


def _plan(args: argparse.Namespace) -> int:
    from spdist import api

    plan = api.plan(
        args.a,
        args.b,
        engine=args.engine,
        memory_limit=args.memory_limit,
        host_limit=args.host_limit,
        grid=args.grid,
        **_product_keywords(args),
    )
    if not args.json:
        from spdist import console

        console.show(*plan.description())
    return _print_json(plan.summary(), args)


def _multiply(args: argparse.Namespace) -> int:
    from spdist import api, console

    with phases.clocked() as clock, console.RunDisplay(quiet=args.json) as shown:
        report = api.multiply(
            args.a,
            args.b,
            args.c,
            engine=args.engine,
            memory_limit=args.memory_limit,
            host_limit=args.host_limit,
            grid=args.grid,
            workers=args.workers,
            scheduler=args.scheduler,
            security=_security(args),
            resume=args.resume,
            **_mode(args),
            check=args.verify,
            record=args.record,
            report=args.report,
            transpose_a=args.transpose_a,
            transpose_b=args.transpose_b,
            axis=args.axis,
            callbacks=shown.callbacks,
            **_product_keywords(args),
        )
    report = replace(report, phases=clock.seconds())
    if not args.json:
        console.show(*report.description(args.c))
    _print_json(report.to_json(), args)
    return 0


def _warm_up(args: argparse.Namespace) -> int:
    from spdist import console
    from spdist.jobs.compiling.warm_up import DTYPES, warm_up

    dtypes = DTYPES if args.dtype is None else args.dtype.split(",")
    with console.transfer_bar("compiling", quiet=args.json) as bar:
        done = warm_up(args.engine, dtypes, args.processes, bar)
    if not args.json:
        console.line(f"kernels of {done['products']} kinds of products are there, after {done['seconds']:.1f} s")
    return _print_json(done, args)


def _cluster_keys(args: argparse.Namespace) -> int:
    from spdist import console
    from spdist.scheduler.clusters.security import write_keys

    files = write_keys(args.folder)
    if not args.json:
        options = " ".join(f"--tls-{name} {files[name]}" for name in ("ca-file", "cert", "key"))
        console.line(f"for dask scheduler, dask worker and spdist multiply: {options}")
        console.line(f"or, in each shell that starts one of them: source {files['environment']}")
    return _print_json({name: str(path) for name, path in files.items()}, args)


def _reduce(args: argparse.Namespace) -> int:
    import numpy as np

    from spdist import api, console
    from spdist.jobs.report import phase_table
    from spdist.storage.atomic_replace import staged_file

    if args.what in VECTORS and args.out is None and not args.json:
        raise InputError(f"{args.what} is a vector: say where it goes with --out FILE.npy, or print it with --json")
    out = (
        nullcontext() if args.out is None else staged_file(args.out, overwrite=True)
    )  # refuses before anything is computed
    with phases.clocked() as clock, out as place, console.RunDisplay(quiet=args.json) as shown:
        found = api.reduce(
            args.a,
            args.b,
            args.what,
            bins=args.bins,
            engine=args.engine,
            memory_limit=args.memory_limit,
            workers=args.workers,
            scheduler=args.scheduler,
            security=_security(args),
            callbacks=shown.callbacks,
            **_product_keywords(args),
        )
        if place is not None:
            with place.open("wb") as file:  # of a name np.save would add .npy to
                np.save(file, found)
    several = "values" if args.what in VECTORS else "bins"
    value = found.tolist() if np.ndim(found) == 0 or args.json else f"{len(found):,} {several}"
    if not args.json:
        console.line(f"{args.what}: {value}" + (f", in {args.out}" if args.out is not None else ""))
        if args.what == "histogram":
            console.histogram_table(args.bins, found.tolist())
        console.show(phase_table(clock.seconds()))
    return _print_json({args.what: value, "phases": clock.seconds()}, args)


def _verify(args: argparse.Namespace) -> int:
    from spdist import api, console
    from spdist.jobs.report import verification_line

    with console.transfer_bar("verifying", quiet=args.json) as bar:
        found = api.verify(args.a, args.b, args.c, progress=bar, **_product_keywords(args))
    if not args.json:
        console.show(verification_line(found.to_json()))
    _print_json(found.to_json(), args)
    return 0 if found.ok else 1


def _mode(args: argparse.Namespace) -> dict[str, bool]:
    return {"overwrite": args.overwrite, "steal": args.steal}


def _product_keywords(args: argparse.Namespace) -> ProductKeywords:
    from spdist.kernels.product_spec import Epilogue

    return {
        "semiring": args.semiring,
        "mask": args.mask,
        "complement": args.complement,
        "triangle": args.triangle,
        "epilogue": Epilogue(args.scale_rows, args.scale_columns, None, args.normalize, args.drop_zeros),
        "threshold": args.threshold,
        "top_n": args.top_n,
    }


def _security(args: argparse.Namespace) -> Security | None:
    """Return the keys that ``--tls-*`` name, if any."""
    if not (args.tls_ca_file or args.tls_cert or args.tls_key):
        return None
    from spdist.scheduler.clusters.security import security_of_files

    return security_of_files(args.tls_ca_file, args.tls_cert, args.tls_key)


def _print_json(content: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(content, default=str))  # complex numbers become text
    return 0


# -- arguments ---------------------------------------------------------------------------------------------------------


class _Verbs:
    """Adds verbs to the parser of the command line."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def add(
        self, name: str, run: Callable[[argparse.Namespace], int], help: str, *operands: str
    ) -> argparse.ArgumentParser:
        """Add a verb that `run` does, with its operands in order and ``--json``; return its parser."""
        sub: argparse.ArgumentParser = self.commands.add_parser(name, help=help, description=help)
        for operand in operands:
            sub.add_argument(operand, metavar=operand.upper())
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.set_defaults(run=run)
        return sub


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command line; `command` is the verb that was given, if any."""
    parser = Parser(
        prog="spdist",
        description="Multiply sparse matrices larger than memory: planned, distributed, resumable, verified.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = _Verbs(parser)
    _add_matrix_verbs(verbs, command)
    _add_product_verbs(verbs)
    return parser


def _add_matrix_verbs(verbs: _Verbs, command: str | None) -> None:
    """Add the verbs that read and write single matrices."""
    sub = verbs.add(
        "import", _import, "convert .mtx, .npz, .h5ad, .abc, .tsv or .csv to a matrix in Zarr", "source", "target"
    )
    add_overwrite(sub)
    text = "store dense blocks of R rows and C columns; auto finds the size of fewest bytes"
    sub.add_argument("--block-size", type=block_size, metavar="RxC", help=text)
    text = "vertices of .abc, .tsv or .csv have names; list them in FILE, one a line in the order of rows"
    sub.add_argument("--labels", metavar="FILE", help=text)
    sub = verbs.add("export", _export, "convert a matrix in Zarr to .mtx, .npz or binsparse", "source", "target")
    sub.add_argument("--format", choices=("mtx", "npz", "binsparse"), help="by default from TARGET's ending")
    add_overwrite(sub)
    sub = verbs.add("transpose", _transpose, "write the transpose of a matrix", "source", "target")
    add_overwrite(sub)
    sub = verbs.add(
        "symmetrize", _symmetrize, "write the whole of a symmetric matrix from its upper triangle", "source", "target"
    )
    sub.add_argument("--conjugate", action="store_true", help="of a Hermitian one")
    add_overwrite(sub)
    sub = verbs.add("info", _info, "shape, dtype, entries, row lengths, bytes and state of a matrix", "matrix")
    sub.add_argument("--spy", metavar="FILE.svg", help="also draw where the entries lie")
    verbs.add("status", _status, "how far a product is: running, stopped or complete, and what to do next", "target")
    sub = verbs.add("report", _report, "make one HTML file of what multiply --record wrote of one or more runs")
    sub.add_argument("records", metavar="RUN.jsonl", nargs="+")
    sub.add_argument("file", metavar="FILE.html")
    verbs.add("check", _check, "read a matrix whole and name everything that is wrong with it", "matrix")
    add_generate(verbs.add("generate", _generate, "write a matrix of a known kind, of any size"), command == "generate")


def _add_product_verbs(verbs: _Verbs) -> None:
    """Add the verbs that plan, compute and verify ``A @ B``."""
    add_plan_options(verbs.add("plan", _plan, "show how A @ B would be cut, and what it takes; runs nothing", "a", "b"))
    add_multiply_options(verbs.add("multiply", _multiply, "compute C = A @ B", "a", "b", "c"))
    add_reduce_options(
        verbs.add("reduce", _reduce, "a number or vector of A @ B, which is never whole", "what", "a", "b")
    )
    add_product_options(verbs.add("verify", _verify, "check that C is A @ B", "a", "b", "c"))
    add_warm_up_options(verbs.add("warm-up", _warm_up, "compile kernels for this machine before products need them"))
    text = "write keys into a new folder, for a Dask scheduler that takes connections from its own cluster alone (TLS)"
    verbs.add("cluster-keys", _cluster_keys, text, "folder")
    text = 'print what completes commands and options in a shell: eval "$(spdist completion bash)"'
    sub = verbs.add("completion", _completion, text)
    sub.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise InputError("completion in shells needs the package shtab: pip install 'spdist[completion]'") from None
    print(shtab.complete(_parser(None), args.shell))
    return 0


def _check_address_space() -> None:
    """Refuse less address space than the libraries need: some of them end the process when they get no more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE:
        raise InputError(
            f"the limit of address space is {limit:,} bytes, and spdist's libraries need {ADDRESS_SPACE:,}: raise it "
            f"(ulimit -v unlimited) and bound memory by --memory-limit"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 if it is done, 1 if the job failed, 2 if the input is wrong.

    Without arguments, those of the process: its phases then count from the start of the process.
    """
    with phases.clocked(phases.process_begin() if argv is None else None):
        return _main(list(sys.argv[1:] if argv is None else argv))


def command() -> NoReturn:
    """Run the command of this process, and end the process: `main` as the ``spdist`` command calls it."""
    gc.set_threshold(GARBAGE)  # what is loaded stays: to search it again and again took a tenth of a small command
    end_process(main())


def end_process(code: int) -> NoReturn:
    """End the process at once; to take the interpreter apart takes a second once Dask and Numba are loaded.

    Parameters
    ----------
    code : int
        Exit code.
    """
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if others:  # Python waits for them
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads: Python's own end says so
        sys.exit(code)
    atexit._run_exitfuncs()
    os._exit(code)


def _main(argv: list[str]) -> int:
    """Run one command."""
    command = next((word for word in argv if not word.startswith("-")), None)
    again = "; continue with --resume" if command == "multiply" else ""
    try:
        return _run(_parser(command), argv)
    except SpdistError as error:
        return _failed(argv, error, one_line(error, LINE), error.exit_code)
    except KeyboardInterrupt as error:
        return _failed(argv, error, f"interrupted{again}", 1)
    except (OSError, MemoryError) as error:
        text = str(error) or ("not enough memory" if isinstance(error, MemoryError) else type(error).__name__)
        return _failed(argv, error, f"{one_line(text, LINE)}{again}", 1)


def _run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Read the arguments and do what they say."""
    args = parser.parse_args(argv)
    if args.version:
        from spdist import __version__

        print(__version__)
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    _show_warnings()
    raise_dropped_interrupts()
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # Zarr's, after an interrupt
    signal.signal(signal.SIGTERM, say_that_it_stops)  # a batch system's leaves a C that can be resumed
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, say_that_it_stops)
    if args.command in ("multiply", "reduce"):
        _check_address_space()
    return int(args.run(args))


def _failed(argv: list[str], error: BaseException, text: str, code: int) -> int:
    """Say why a command failed: a line on stderr, and with ``--json`` an object on stdout."""
    print(f"spdist: {text}", file=sys.stderr)
    if "--json" in argv:
        print(json.dumps({"error": text, "kind": type(error).__name__, "exit_code": code}))
    return code
