"""Commands of applications: neighbours, co-occurrence, triangles, paths, clusters, ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import asdict, replace
from typing import Any

from spdist.cli.options import add_mode, add_options, chosen, count_of, given
from spdist.cli.verbs import FILE, GRAPH, MATRIX, PRODUCT, Verbs, goes_to_standard_output, print_json
from spdist.errors import InputError, one_line
from spdist.foundation import phases
from spdist.foundation.standard_output import standard_output
from spdist.foundation.units import counted
from spdist.options import ApplicationKeywords, CountKeywords, FileKeywords, TaskKeywords, WhereKeywords, WorkerKeywords

WALKS = {"host": "in memory", "gpu": "on the GPU", "storage": "in storage"}
"""Names of the memory that held the walks of Markov clustering."""
SCHEMES = {
    1: (3_000, 400, 500), 2: (4_000, 500, 600), 3: (5_000, 600, 700), 4: (6_000, 700, 800),
    5: (7_000, 800, 900), 6: (10_000, 1_100, 1_400), 7: (10_000, 1_200, 1_600),
}  # fmt: skip
"""Values of `prune`, `select` and `recover` in each scheme of mcl."""


def add_application_verbs(verbs: Verbs) -> None:
    """Add the verbs of applications."""
    text = "bring a product up to date after `append` gave A or B more rows; only what is new is computed"
    sub = verbs.add("update", _update, text, c="product of `multiply`, path or URL")
    sub.add_argument("operands", nargs="*", metavar="A B", help="by default where they were when C was made")
    add_options(sub, "steal", WhereKeywords)
    sub = verbs.add("similarity", _similarity, "the most similar rows of each row, by the cosine", a=FILE, c=PRODUCT)
    sub.add_argument("--top-n", type=count_of, metavar="N", help="rows kept for each row, by default 10")
    sub.add_argument("--threshold", type=float, metavar="X", help="keep similarities from X up")
    sub.add_argument("--metric", help="cosine (default) or inner_product")
    sub.add_argument("--corpus", metavar="B", help="search the rows of this matrix, by default of A")
    _add_stored(sub)
    add_options(sub, FileKeywords)
    text = "the nearest rows of each row of dense data, exact"
    sub = verbs.add("neighbors", _neighbors, text, a="file or matrix in Zarr, path or URL", c=PRODUCT)
    sub.add_argument("--n-neighbors", type=count_of, metavar="N", help="neighbours of each row, by default 15")
    sub.add_argument("--metric", help="euclidean (default), cosine or inner_product")
    sub.add_argument("--corpus", metavar="B", help="search the rows of this file or matrix, by default of A")
    add_options(sub, "engine", "memory_limit", "overwrite", "steal", FileKeywords)
    text = "for each pair of columns, count the rows that have both: A.T @ A"
    sub = verbs.add("cooccurrence", _cooccurrence, text, a=MATRIX, c=PRODUCT)
    sub.add_argument("--measure", help="count (default), or pmi: pointwise mutual information")
    _add_pairs(sub)
    text = "Pearson's correlation of each pair of columns, or their covariance"
    sub = verbs.add("correlation", _correlation, text, a=FILE, c=PRODUCT)
    sub.add_argument("--measure", help="correlation (default) or covariance")
    sub.add_argument("--other", metavar="B", help="correlate with the columns of this matrix, by default of A")
    sub.add_argument("--mask", metavar="M", help="compare the pairs that are entries of this matrix")
    _add_pairs(sub)
    add_options(sub, FileKeywords)
    sub = verbs.add("triangles", _triangles, "count the triangles of a graph", graph=GRAPH)
    sub.add_argument("--folder", help="for a copy of the edges; all workers must see it")
    add_options(sub, WhereKeywords, FileKeywords)
    text = "lengths of shortest paths of a graph"
    lengths = "where the lengths go, a matrix in Zarr, path or URL"
    sub = verbs.add("shortest-paths", _shortest_paths, text, graph=GRAPH, d=lengths)
    text = "vertices to start from, by default all: names, or rows counted from 0 if no name is a number"
    sub.add_argument("--sources", type=_vertices, metavar="I,J,...", help=text)
    sub.add_argument("--hops", type=count_of, metavar="N", help="most edges of a path")
    _add_steps(sub, "D")
    add_options(sub, WhereKeywords, FileKeywords)
    text = "rank the nodes of a graph; ranks go to a .npy file"
    sub = verbs.add("pagerank", _pagerank, text, graph=GRAPH, ranks=".npy file to write")
    sub.add_argument("--damping", type=float, help="chance to follow a link, by default 0.85")
    sub.add_argument("--tolerance", type=float, help="total change of ranks that ends it")
    sub.add_argument("--maxiter", type=count_of, metavar="N", help="most iterations")
    sub.add_argument("--gpu", action="store_true", help="multiply on GPUs")
    sub.add_argument("--overwrite", action="store_true", help="replace RANKS, and the FILE of --labels")
    text = "list the names of the vertices in FILE, one per line in the order of RANKS"
    sub.add_argument("--labels", metavar="FILE", help=text)
    add_options(sub, WorkerKeywords, FileKeywords)
    _add_clustering(verbs)


def _add_clustering(verbs: Verbs) -> None:
    text = "clusters of a graph by Markov clustering, as mcl: GRAPH is a list of edges (.abc) or a matrix"
    sub = verbs.add("markov-clustering", _markov_clustering, text, graph=GRAPH)
    text = "text file, one cluster per line; - for standard output"
    sub.add_argument("-o", dest="out", metavar="CLUSTERS", required=True, help=text)
    sub.add_argument("-I", dest="inflation", type=float, metavar="X", help="inflation, by default 2.0")
    sub.add_argument("-pi", dest="pre_inflation", type=float, metavar="X", help="raise weights to this power first")
    sub.add_argument("-scheme", type=int, choices=SCHEMES, default=6, help="sets -P, -S and -R together, by default 6")
    sub.add_argument("-P", dest="prune", type=int, metavar="N", help="drop values below 1/N")
    text = "keep the N largest values of a row (mcl's column)"
    sub.add_argument("-S", dest="select", type=int, metavar="N", help=text)
    text = "if pruning leaves less than -pct percent of a row, take back up to N of its largest values"
    sub.add_argument("-R", dest="recover", type=int, metavar="N", help=text)
    text = "percent of a row's sum below which -R recovers, by default 90"
    sub.add_argument("-pct", dest="recover_percent", type=float, metavar="X", help=text)
    sub.add_argument("-te", dest="threads", type=count_of, metavar="N", help="CPUs to use, by default all")
    text = "GRAPH is a list of edges, whatever its name: --format abc"
    sub.add_argument("--abc", action="store_const", const="abc", dest="format", help=text)
    text = "names of the vertices of a matrix, one per line; by default of its rows"
    sub.add_argument("--labels", metavar="FILE", help=text)
    sub.add_argument("--maxiter", type=count_of, metavar="N", help="most steps")
    _add_steps(sub, "CLUSTERS")
    add_options(sub, WhereKeywords, FileKeywords)


def _add_steps(sub: argparse.ArgumentParser, target: str) -> None:
    text = "go on with the step where an earlier run was stopped"
    add_mode(sub, resume=text, overwrite=f"replace {target} once the new one is whole")


def _add_pairs(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--threshold", type=float, metavar="X", help="keep values from X up")
    sub.add_argument("--top-n", type=count_of, metavar="N", help="keep the N largest of each column")
    sub.add_argument("--triangle", metavar="upper", help="each pair once, above the diagonal")
    _add_stored(sub)


def _add_stored(sub: argparse.ArgumentParser) -> None:
    add_options(sub, "check")
    add_mode(sub)
    add_options(sub, WhereKeywords)


def _vertices(text: str) -> list[str]:
    if not all(parts := text.split(",")):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of vertices: write numbers or names, as in 0,17")
    return parts


def _stored(function: Any, args: argparse.Namespace, keywords: dict[str, Any]) -> int:
    """Run an application whose result is a product, and show its report."""
    from spdist.cli import console

    with phases.clocked() as clock, console.RunDisplay(quiet=args.json) as shown:
        report = function(args.a, args.c, callbacks=shown.callbacks, **keywords)
    args.made = args.c
    report = replace(report, phases=clock.seconds())
    if not args.json:
        console.show(*report.description(args.c))
    return print_json(report.to_json(), args)


def _update(args: argparse.Namespace) -> int:
    from spdist.applications.growth import update
    from spdist.cli import console

    if len(args.operands) not in (0, 2):
        raise InputError(f"{len(args.operands)} operand given: name A and B, or neither")
    with console.RunDisplay(quiet=args.json) as shown:
        found = update(args.c, *args.operands, callbacks=shown.callbacks, **given(args, WhereKeywords, "steal"))
    args.made = args.c
    if not args.json:
        console.line(f"{args.c}: {found.nrows:,} x {found.ncols:,} with {counted(found.nnz, 'entry')}")
    return print_json({"shape": list(found.shape), "nnz": found.nnz}, args)


def _similarity(args: argparse.Namespace) -> int:
    from spdist.applications.similarity import similarity

    own = chosen(args, "top_n", "threshold", "metric", "corpus")
    return _stored(similarity, args, own | given(args, TaskKeywords, "check"))


def _neighbors(args: argparse.Namespace) -> int:
    from spdist.applications.nearest_rows import kneighbors_graph
    from spdist.cli import console

    own = chosen(args, "n_neighbors", "metric", "corpus", "engine", "memory_limit", "overwrite", "steal")
    found = kneighbors_graph(args.a, args.c, **own, **given(args, FileKeywords))
    args.made = args.c
    each = found.nnz // max(found.nrows, 1)
    if not args.json:
        console.line(f"{counted(each, 'neighbour')} of each of {counted(found.nrows, 'row')}; the graph is in {args.c}")
    return print_json({"rows": found.nrows, "neighbors": each}, args)


def _cooccurrence(args: argparse.Namespace) -> int:
    from spdist.applications.cooccurrence import cooccurrence

    own = chosen(args, "measure", "threshold", "top_n", "triangle")
    return _stored(cooccurrence, args, own | given(args, ApplicationKeywords, "check"))


def _correlation(args: argparse.Namespace) -> int:
    from spdist.applications.correlation import correlation

    own = chosen(args, "measure", "other", "mask", "threshold", "top_n", "triangle")
    return _stored(correlation, args, own | given(args, TaskKeywords, "check"))


def _triangles(args: argparse.Namespace) -> int:
    from spdist.applications.triangles import triangles
    from spdist.cli import console

    with console.RunDisplay(quiet=args.json) as shown:
        own = {"folder": args.folder, "callbacks": shown.callbacks}
        found = triangles(args.graph, **own, **given(args, CountKeywords))
    if not args.json:
        of = f"{counted(found.vertices, 'vertex')} and {counted(found.edges, 'edge')}"
        console.line(f"{counted(found.triangles, 'triangle')} of {of}")
    return print_json(asdict(found), args)


def _shortest_paths(args: argparse.Namespace) -> int:
    from spdist.applications.shortest_paths import shortest_paths
    from spdist.cli import console

    steps = []

    def on_step(step: int, facts: dict[str, Any]) -> None:
        steps.append(step)
        if not args.json:
            hops, pairs = counted(facts["hops"], "hop"), counted(facts["pairs"], "pair")
            console.line(f"step {step}: paths of at most {hops}, {pairs}")

    own = {"sources": args.sources, "hops": args.hops, "on_step": on_step}
    found = shortest_paths(args.graph, args.d, **own, **given(args, TaskKeywords))
    args.made = args.d
    if not args.json:
        pairs, vertices = counted(found.nnz, "pair"), counted(found.ncols, "vertex")
        console.line(f"paths between {pairs} of {vertices}; their lengths are in {args.d}")
    return print_json({"steps": len(steps), "pairs": found.nnz, "vertices": found.ncols}, args)


def _markov_clustering(args: argparse.Namespace) -> int:
    from spdist.applications.markov_clustering.markov_clustering import markov_clustering
    from spdist.cli import console

    if args.threads is not None:
        if not hasattr(os, "sched_setaffinity"):
            raise InputError("-te binds this process to CPUs, which this system does not do: leave it out")
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])

    to_stdout = goes_to_standard_output(args, args.out, option="-o")
    say = console.notice if to_stdout else console.line

    def on_step(step: int, facts: dict[str, Any]) -> None:
        if not args.json:
            say(f"step {step}: {counted(facts['entries'], 'entry')}, chaos {facts['chaos']:.2g}")

    numbers: dict[str, Any] = dict(zip(("prune", "select", "recover"), SCHEMES[args.scheme], strict=True))
    numbers |= chosen(args, *numbers, "inflation", "pre_inflation", "recover_percent", "maxiter", "labels")
    out = None if to_stdout else args.out
    with phases.clocked() as clock:
        found = markov_clustering(args.graph, out, on_step=on_step, **numbers, **given(args, TaskKeywords))
    if to_stdout:
        with standard_output() as out_file:
            out_file.writelines(found.lines())
    else:
        args.made = args.out
    facts = found.summary()
    if not args.json:
        after = f"{counted(facts['clusters'], 'cluster')} after {counted(facts['steps'], 'step')} {WALKS[found.place]}"
        sizes = f"the largest has {counted(facts['largest'], 'vertex')}; {facts['alone']:,} with one"
        say(f"{after}, in {'standard output' if to_stdout else args.out}: {sizes}")
        if not found.converged:
            console.warning(f"walks still change, chaos {found.chaos:.2g}: raise --maxiter")
    print_json(facts | {"phases": clock.seconds()}, args)
    return 0 if found.converged else 1


def _pagerank(args: argparse.Namespace) -> int:
    import numpy as np

    from spdist.applications.pagerank import pagerank
    from spdist.cli import console
    from spdist.storage.atomic_replace import staged_file
    from spdist.storage.names.names import text_of

    with contextlib.ExitStack() as stack:
        place = stack.enter_context(staged_file(args.ranks, overwrite=args.overwrite))
        labels = args.labels and stack.enter_context(staged_file(args.labels, overwrite=args.overwrite))
        own = chosen(args, "damping", "tolerance", "maxiter") | {"on_gpu": args.gpu}
        found = pagerank(args.graph, **own, **given(args, WorkerKeywords, FileKeywords))
        if labels:
            if found.names is None:
                raise InputError(f"--labels: vertices of {args.graph} have no names; number i of RANKS is of vertex i")
            labels.write_bytes(text_of(found.names.tolist(), args.graph))
        with place.open("wb") as ranks:  # np.save would add .npy to a name
            np.save(ranks, found.x)
    args.made = args.ranks
    facts = {name: getattr(found, name) for name in ("iterations", "residual", "converged", "seconds")}
    best = np.argsort(-found.x, kind="stable")[:10]
    facts["top"] = [{"node": int(node), "rank": float(found.x[node])} for node in best]
    if found.names is not None:
        facts["top"] = [{**one, "name": found.names[one["node"]]} for one in facts["top"]]
    if not args.json:
        done = f"{counted(found.iterations, 'iteration')} in {found.seconds:.2f} s"
        listed = args.labels or "the names that --labels FILE lists"
        order = "" if found.names is None else f", in the order of {listed}"
        console.line(f"{done}; ranks are in {args.ranks}{order}; the first:")
        for one in facts["top"]:
            console.line(f"  {one['node']:>12,}  {one['rank']:.3e}  {one_line(one.get('name', ''), 60)}".rstrip())
    print_json(facts, args)
    return 0 if found.converged else 1
