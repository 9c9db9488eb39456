"""Commands that read and write single matrices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from spdist.cli.facts import show_facts
from spdist.cli.options import MODE, TARGET, add_generate, add_options, add_overwrite, block_size, chosen, given
from spdist.cli.verbs import MATRIX, Verbs, goes_to_standard_output, print_json
from spdist.errors import InputError
from spdist.options import FileKeywords

if TYPE_CHECKING:
    from spdist.storage.matrix import StoredMatrix


def add_matrix_verbs(verbs: Verbs, command: str | None) -> None:
    """Add the verbs that read and write single matrices.

    `command`: the verb that was chosen.
    """
    text = "convert a file of another program to a matrix in Zarr"
    source = (
        "file, path or URL, or - for standard input; of an .h5ad X is read, or the path after ::, as in "
        "cells.h5ad::layers/counts; of an AnnData in Zarr likewise"
    )
    sub = verbs.add("import", _import, text, source=source, target=TARGET)
    add_overwrite(sub)
    text = "store dense blocks of R rows and C columns; auto finds the size of fewest bytes"
    sub.add_argument("--block-size", type=block_size, metavar="RxC", help=text)
    add_options(sub, FileKeywords)
    text = "vertices of a list of edges have names; store them with the matrix"
    sub.add_argument("--names", action="store_true", help=text)
    text = "as --names, and list the names in FILE too, one per line in the order of rows"
    sub.add_argument("--labels", metavar="FILE", help=text)
    text = "edges of a list in one place: their sum (default), the largest (max), the smallest (min) or the first"
    sub.add_argument("--duplicates", choices=("sum", "max", "min", "first"), default="sum", help=text)
    text = "convert a matrix in Zarr to .mtx, a list of edges (.abc, .tsv), .npz or binsparse"
    target = "file to write, or - for standard output; for binsparse a folder or URL"
    sub = verbs.add("export", _export, text, source=MATRIX, target=target)
    text = "mtx, abc, tsv, npz, binsparse, mtx.gz, ...; by default from TARGET's ending"
    sub.add_argument("--format", metavar="NAME", help=text)
    add_overwrite(sub)
    sub = verbs.add("transpose", _transpose, "write the transpose of a matrix", source=MATRIX, target=TARGET)
    add_overwrite(sub)
    text = "append the rows of one matrix to another one"
    sub = verbs.add(
        "append", _append, text, target="matrix to grow, in Zarr, path or URL", source=f"new rows: {MATRIX}"
    )
    add_options(sub, "steal")
    text = "write the whole of a symmetric matrix from its upper triangle"
    sub = verbs.add("symmetrize", _symmetrize, text, source=f"upper triangle: {MATRIX}", target=TARGET)
    sub.add_argument("--conjugate", action="store_true", help="of a Hermitian one")
    add_overwrite(sub)
    text = "shape, dtype, entries, row lengths, bytes and state of a matrix; or, with --machine, rates of this machine"
    sub = verbs.add("info", _info, text)
    sub.add_argument("matrix", metavar="MATRIX", nargs="?", help=f"{MATRIX}; none with --machine")
    sub.add_argument("--machine", action="store_true", help="measure this machine, for predictions; some seconds")
    sub.add_argument("--folder", help="with --machine: write there meanwhile; by default where temporary files go")
    sub.add_argument("--spy", metavar="FILE.svg", help="also draw where the entries lie")
    text = "how far a product is: running, stopped or complete, and what to do next"
    verbs.add("status", _status, text, target="the product, finished or not, path or URL")
    sub = verbs.add("report", _report, "make one HTML file of what multiply --record wrote of one or more runs")
    sub.add_argument("records", metavar="RUN.jsonl", nargs="+", help="file that --record named")
    sub.add_argument("file", metavar="FILE.html", help="HTML file to write")
    verbs.add("check", _check, "read a matrix whole and name everything that is wrong with it", matrix=MATRIX)
    add_generate(verbs.add("generate", _generate, "write a matrix of a known kind, of any size"), command == "generate")


def _import(args: argparse.Namespace) -> int:
    from spdist.cli import console
    from spdist.storage.import_export import import_matrix

    with console.transfer_bar(f"importing {args.source}", quiet=args.json) as bar:
        keywords = chosen(args, "block_size", "duplicates", "names", "labels") | given(args, FileKeywords, *MODE)
        matrix = import_matrix(args.source, args.target, progress=bar, **keywords)
    return _show_matrix(matrix, args)


def _export(args: argparse.Namespace) -> int:
    from spdist.cli import console
    from spdist.storage.import_export import export_matrix

    to_stdout = goes_to_standard_output(args, args.target, option="TARGET")
    with console.transfer_bar(f"exporting {args.source}", quiet=args.json) as bar:
        export_matrix(args.source, args.target, format=args.format, **given(args, *MODE), progress=bar)
    args.made = None if to_stdout else args.target
    if not args.json and not to_stdout:
        console.line(f"wrote {args.target}")
    return print_json({"target": args.target}, args)


def _generate(args: argparse.Namespace) -> int:
    from spdist.cli import console
    from spdist.storage.generators import KINDS, generate

    names = {name for kind in KINDS.values() for name in kind.parameters}
    parameters = chosen(args, *names)
    with console.transfer_bar(f"generating {args.kind}", quiet=args.json) as bar:
        keywords = given(args, *MODE) | chosen(args, "dtype", "seed") | parameters
        matrix = generate(args.kind, args.target, progress=bar, **keywords)
    return _show_matrix(matrix, args)


def _transpose(args: argparse.Namespace) -> int:
    from spdist.cli import console
    from spdist.storage.transpose import transpose

    with console.transfer_bar(f"transposing {args.source}", quiet=args.json) as bar:
        matrix = transpose(args.source, args.target, **given(args, *MODE), progress=bar)
    return _show_matrix(matrix, args)


def _append(args: argparse.Namespace) -> int:
    from spdist.jobs.save import append

    return _show_matrix(append(args.target, args.source, **given(args, "steal")), args)


def _symmetrize(args: argparse.Namespace) -> int:
    from spdist.cli import console
    from spdist.storage.transpose import symmetrize

    with console.transfer_bar(f"mirroring {args.source}", quiet=args.json) as bar:
        matrix = symmetrize(args.source, args.target, conjugate=args.conjugate, **given(args, *MODE), progress=bar)
    return _show_matrix(matrix, args)


def _info(args: argparse.Namespace) -> int:
    if args.matrix is None or args.machine:
        return _info_of_machine(args)
    from spdist.api import products as api

    facts = api.info(args.matrix)
    if getattr(args, "spy", None) is not None:
        from spdist.storage.atomic_replace import staged_file

        with staged_file(args.spy, overwrite=True) as place:
            place.write_text(api.spy(args.matrix).to_svg())
        facts["picture"] = args.spy
    if not args.json:
        show_facts(facts)
    return print_json(facts, args)


def _info_of_machine(args: argparse.Namespace) -> int:
    if not args.machine or args.matrix is not None:
        raise InputError("spdist info needs a MATRIX, or --machine without one")
    from spdist.cli import console

    return print_json(console.measured_machine(args.folder, quiet=args.json).to_json(), args)


def _status(args: argparse.Namespace) -> int:
    from spdist.api import products as api

    facts = api.status(args.target)
    if not args.json:
        show_facts(facts)
    return print_json(facts, args)


def _report(args: argparse.Namespace) -> int:
    from spdist.jobs.reports.run_report import write_report

    write_report(args.records, args.file)
    return print_json({"report": args.file, "runs": len(args.records)}, args)


def _check(args: argparse.Namespace) -> int:
    from spdist.api import products as api
    from spdist.cli import console

    with console.transfer_bar(f"checking {args.matrix}", quiet=args.json) as bar:
        found = api.check(args.matrix, progress=bar)
    if not args.json:
        console.check_lines(found)
    print_json(found.to_json(), args)
    return 0 if found.ok else 1


def _show_matrix(matrix: StoredMatrix, args: argparse.Namespace) -> int:
    args.matrix, args.machine, args.made = matrix.url, False, matrix.url
    return _info(args)
