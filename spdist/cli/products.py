"""Commands that plan, compute and verify products of two matrices."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace

from spdist.cli.options import add_bins, add_mode, add_options, count_of, given
from spdist.cli.verbs import MATRIX, PRODUCT, Verbs, print_json
from spdist.errors import InputError
from spdist.foundation import phases
from spdist.foundation.units import counted
from spdist.options import (
    GridKeywords,
    MultiplyKeywords,
    PlanKeywords,
    ProductKeywords,
    ReduceKeywords,
    VerifyKeywords,
    WorkerKeywords,
)

REDUCTIONS = "sum, row_sums, column_sums, trace, nnz, row_nnz, frobenius, histogram"
"""Reductions of a product."""
VECTORS = ("row_sums", "column_sums", "row_nnz")
"""Reductions to a value for each row or column of C."""


def add_product_verbs(verbs: Verbs) -> None:
    """Add the verbs that plan, compute and verify ``A @ B``."""
    text = "show how A @ B would be cut, and what it takes here; writes nothing"
    sub = verbs.add("plan", _plan, text, a=MATRIX, b=MATRIX)
    sub.add_argument("--reduce", metavar="WHAT", help="plan spdist reduce WHAT")
    add_bins(sub)
    add_options(sub, PlanKeywords)
    sub = verbs.add("multiply", _multiply, "compute C = A @ B", a=MATRIX, b=MATRIX, c=PRODUCT)
    add_options(sub, GridKeywords, WorkerKeywords, "part", "check", "record", "report")
    add_options(sub, "transpose_a", "transpose_b", "axis")
    add_mode(sub)
    add_options(sub, ProductKeywords)
    text = "compute a sum, norm, trace, count or histogram of A @ B without storing it"
    sub = verbs.add("reduce", _reduce, text, what=f"one of {REDUCTIONS}", a=MATRIX, b=MATRIX)
    add_bins(sub)
    text = "where to write it; a value for each row or column goes there, or is printed with --json"
    sub.add_argument("--out", metavar="FILE.npy", help=text)
    add_options(sub, ReduceKeywords)
    product = "product in Zarr, path or URL"
    sub = verbs.add("verify", _verify, "check that C is A @ B", a=MATRIX, b=MATRIX, c=product)
    add_options(sub, VerifyKeywords)
    sub = verbs.add("warm-up", _warm_up, "compile kernels for this machine before products need them")
    sub.add_argument("--engine", default="auto", help="auto (default) for CPUs; cuda: for the GPU here too")
    sub.add_argument("--dtype", metavar="NAME,NAME", help="of values; by default float32,float64")
    sub.add_argument("--processes", type=count_of, help="that compile side by side; by default one per CPU")
    text = "write keys into a new folder, for a Dask scheduler that takes connections from its own cluster alone (TLS)"
    verbs.add("cluster-keys", _cluster_keys, text, folder="folder to make for the keys")


def _plan(args: argparse.Namespace) -> int:
    from spdist.jobs.predicting.predict import plan_and_predict
    from spdist.kernels.reduction_spec import reduction_of
    from spdist.options import ExecutionOptions, ProductOptions

    execution = ExecutionOptions(**given(args, GridKeywords))
    what = None if args.reduce is None else reduction_of(args.reduce, args.bins)
    product = ProductOptions(**given(args, ProductKeywords))
    plan, prediction = plan_and_predict((args.a, args.b), product, execution, what)
    if not args.json:
        from spdist.cli import console

        console.show(*plan.description(prediction.core_seconds), *prediction.lines())
    return print_json(plan.summary() | prediction.to_json(), args)


def _multiply(args: argparse.Namespace) -> int:
    if args.scheduler is None and args.workers is None:
        from spdist.jobs.starting.libraries import load_early

        load_early(args.engine)
    from spdist.api import products as api
    from spdist.cli import console

    with phases.clocked() as clock, console.RunDisplay(quiet=args.json) as shown:
        report = api.multiply(args.a, args.b, args.c, callbacks=shown.callbacks, **given(args, MultiplyKeywords))
    args.made = args.c
    report = replace(report, phases=clock.seconds())
    if not args.json:
        console.show(*report.description(args.c))
    print_json(report.to_json(), args)
    return 0


def _warm_up(args: argparse.Namespace) -> int:
    from spdist.cli import console
    from spdist.jobs.compiling.warm_up import DTYPES, warm_up

    dtypes = DTYPES if args.dtype is None else args.dtype.split(",")
    with console.transfer_bar("compiling", quiet=args.json) as bar:
        done = warm_up(args.engine, dtypes, args.processes, bar)
    if not args.json:
        console.line(f"kernels of {done['products']} kinds of products are there, after {done['seconds']:.1f} s")
    console.measured_machine(None, quiet=args.json)
    return print_json(done, args)


def _cluster_keys(args: argparse.Namespace) -> int:
    from spdist.cli import console
    from spdist.scheduler.clusters.security import write_keys

    files = write_keys(args.folder)
    if not args.json:
        options = " ".join(f"--tls-{name} {files[name]}" for name in ("ca-file", "cert", "key"))
        console.line(f"for dask scheduler, dask worker and spdist multiply: {options}")
        console.line(f"or, in each shell that starts one of them: source {files['environment']}")
    return print_json({name: str(path) for name, path in files.items()}, args)


def _reduce(args: argparse.Namespace) -> int:
    import numpy as np

    from spdist.api import products as api
    from spdist.cli import console
    from spdist.jobs.report import phase_table
    from spdist.storage.atomic_replace import staged_file

    if args.what in VECTORS and args.out is None and not args.json:
        raise InputError(f"{args.what} is a vector: say where it goes with --out FILE.npy, or print it with --json")
    out = (
        nullcontext() if args.out is None else staged_file(args.out, overwrite=True)
    )  # refuses before anything is computed
    with phases.clocked() as clock, out as place, console.RunDisplay(quiet=args.json) as shown:
        keywords = given(args, ReduceKeywords) | {"bins": args.bins, "callbacks": shown.callbacks}
        found = api.reduce(args.a, args.b, args.what, **keywords)
        if place is not None:
            with place.open("wb") as file:  # np.save would add .npy to a name
                np.save(file, found)
    one = "value" if args.what in VECTORS else "bin"
    value = found.tolist() if np.ndim(found) == 0 or args.json else counted(len(found), one)
    if not args.json:
        console.line(f"{args.what}: {value}" + (f", in {args.out}" if args.out is not None else ""))
        if args.what == "histogram":
            console.histogram_table(args.bins, found.tolist())
        console.show(phase_table(clock.seconds()))
    return print_json({args.what: value, "phases": clock.seconds()}, args)


def _verify(args: argparse.Namespace) -> int:
    from spdist.api import products as api
    from spdist.cli import console
    from spdist.jobs.report import verification_line

    with console.transfer_bar("verifying", quiet=args.json) as bar:
        found = api.verify(args.a, args.b, args.c, progress=bar, **given(args, VerifyKeywords))
    if not args.json:
        console.show(verification_line(found.to_json()))
    print_json(found.to_json(), args)
    return 0 if found.ok else 1
