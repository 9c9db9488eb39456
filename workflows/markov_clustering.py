"""Markov clustering of a graph: random walks that are spread, sharpened and pruned until they stay in clusters [1]_.

::

    python workflows/markov_clustering.py JOB.yaml [--set key=value ...]

Rows of M hold where a walk from each vertex goes. M <- M M (expansion) is never whole: each row is raised to the power
`inflation`, scaled to sum 1, and cut to values from `threshold` up and the `top_n` largest as soon as it is made. Where
nothing changes any more, vertices whose walks end at the same place are a cluster. Each step is stored beside `out`; a
job that was stopped goes on with the step it was at. The result is a text file with the cluster of each vertex a line.
workflows/markov_clustering.yaml explains the keys.

References
----------
.. [1] S. van Dongen, "Graph clustering by flow simulation", thesis, University of Utrecht, 2000.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import job as jobs
import job_file
import job_matrices
import numpy as np
import scipy.sparse as sp

CHANGE = 1e-6
"""Change of a row's largest values below which walks stand still."""


@dataclass(frozen=True, kw_only=True)
class Job(job_file.WholeJob):
    """What a job file says; `markov_clustering.yaml` explains the keys."""

    a: str
    inflation: float = 2.0
    threshold: float = 1e-4
    top_n: int = 500
    steps: int = 100


def power(value: object) -> float:
    """Accept a number above 1.

    Raises
    ------
    ValueError
        If it is another value; the message follows the key's name.
    """
    if job_file.number(value) <= 1:
        raise ValueError("is no power that sharpens; write a number above 1, for instance 2")
    return float(value)


READERS = {
    "a": job_file.text_of,
    "inflation": power,
    "threshold": job_file.number,
    "top_n": job_file.count,
    "steps": job_file.count,
    **job_file.WHOLE,
}


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Expand, inflate and prune until nothing changes; write the clusters.

    Parameters
    ----------
    job : Job
    log : Log
        Writes the progress.

    Returns
    -------
    dict
        The result for the report.

    Raises
    ------
    ConvergenceError
        If walks still change after the last step.
    """
    import spdist

    epilogue = spdist.Epilogue(apply=raised_to(job.inflation), normalize="l1")
    a = job_matrices.square("a", spdist.open(job.a))
    walk = first_walks(
        job_matrices.with_values("a", a, lambda x: np.isfinite(x) & (x >= 0), "finite weights of 0 and more")
    )
    with job_matrices.scratch(job.out, "walks", keep=True) as (walks,), job.where_for_all() as where:
        spdist.save(walks, walk, overwrite=True)
        before, step, converged = walks, 0, False
        while step < job.steps and not converged:
            step += 1
            after = f"{walks}-{step}"
            spdist.multiply(
                before,
                before,
                after,
                epilogue=epilogue,
                threshold=job.threshold,
                top_n=job.top_n,
                resume=True,
                **where,
                callbacks=log.callbacks(),
            )
            change = largest_change(spdist.open(before), spdist.open(after))
            jobs.say(f"step {step}: {spdist.open(after).nnz:,} entries, change {change:.1e}")
            before, converged = after, change < CHANGE
        labels = clusters(spdist.open(before))
        job_matrices.remove_steps(walks, step)
    Path(job.out).write_text("".join(f"{label}\n" for label in labels))
    sizes = np.bincount(labels)
    facts = {"clusters": len(sizes), "largest": int(sizes.max()), "alone": int((sizes == 1).sum()), "steps": step}
    if not converged:
        raise jobs.ConvergenceError(
            f"not converged: the last change is {change:.1e}; {summary(facts)}; raise steps", facts
        )
    return {**facts, "converged": True}


def raised_to(inflation: float) -> Callable[[Any], Any]:
    """Return the function that inflates."""
    if inflation == 2:
        return lambda x: x * x
    return lambda x: x**inflation


def first_walks(a: Any) -> Any:
    """Return one step of a walk: the graph, symmetric, with a loop at each vertex as heavy as its heaviest edge."""
    m = a.rows(0, a.nrows).to_scipy().astype(np.float64).tocsr()
    m = m.maximum(m.T)
    heaviest = m.max(axis=1).toarray().ravel()
    m = m - sp.diags_array(m.diagonal()) + sp.diags_array(np.where(heaviest > 0, heaviest, 1.0))
    m = sp.csr_array(m)
    m.eliminate_zeros()
    return sp.csr_array(sp.diags_array(1 / m.sum(axis=1)) @ m)


def largest_change(p: Any, q: Any) -> float:
    """Return the largest change of a value.

    Parameters
    ----------
    p, q : StoredMatrix
        Of one shape.

    Returns
    -------
    float
        The largest absolute value of ``p - q``.
    """
    change = 0.0
    for start, stop, _ in p.row_blocks(1 << 20):
        one, other = p.rows(start, stop).to_scipy(), q.rows(start, stop).to_scipy()
        change = max(change, float(abs(one - other).max()) if one.nnz + other.nnz else 0.0)
    return change


def clusters(m: Any) -> Any:
    """Return the number of each vertex's cluster: walks that end at one place belong together."""
    from scipy.sparse.csgraph import connected_components

    return connected_components(m.rows(0, m.nrows).to_scipy(), directed=False)[1]


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return (
        f"{result['clusters']:,} clusters after {result['steps']} steps: the largest has {result['largest']:,} "
        f"vertices, {result['alone']:,} have one"
    )


WORKFLOW = jobs.Workflow(__doc__, Job, READERS, ("a",), run, summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return jobs.main(WORKFLOW, argv)


if __name__ == "__main__":
    sys.exit(main())
