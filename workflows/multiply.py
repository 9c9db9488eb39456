"""Run one product as a batch job: a job file in, C and a JSON report out, lines for a log while it runs.

::

    python workflows/multiply.py JOB.yaml [--set key=value ...]

The job file is checked whole before anything starts. A signal of the batch system (SIGTERM, SIGUSR1) ends the run so
that C can be resumed, and the same command goes on from there. Relative paths count from the current folder.

Exit codes: 0 done; 1 the job failed, or C is false; 2 the job file or a matrix is wrong, nothing was written; 75
stopped by a signal before the end: run it again. workflows/multiply.yaml explains the keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file


@dataclass(frozen=True, kw_only=True)
class Job(job_file.ProductJob):
    """What a job file says; `multiply.yaml` explains the keys."""

    a: str
    b: str
    grid: tuple[int, int, int] | None = None
    verify: bool = True
    steal: bool = False
    record: str | None = None
    semiring: str = "plus_times"
    mask: str | None = None
    complement: bool = False
    triangle: str | None = None
    scale_rows: str | None = None
    scale_columns: str | None = None
    normalize: str | None = None
    drop_zeros: bool = False
    threshold: float | None = None
    top_n: int | None = None
    axis: int = 1
    transpose_a: bool = False
    transpose_b: bool = False


def axis_of(value: object) -> int:
    """Accept 0 and 1.

    Raises
    ------
    ValueError
        If it is another value; the message follows the key's name.
    """
    if job_file.number(value) not in (0, 1):
        raise ValueError("is no axis; write 1 for rows or 0 for columns")
    return int(value)


READERS = {
    "a": job_file.text_of,
    "b": job_file.text_of,
    "out": job_file.text_of,
    "engine": job_file.engine_of,
    "memory_limit": job_file.size,
    "host_limit": job_file.size,
    "grid": job_file.grid_of,
    "semiring": job_file.text_of,
    "mask": job_file.text_of,
    "complement": job_file.flag,
    "triangle": job_file.text_of,
    "scale_rows": job_file.text_of,
    "scale_columns": job_file.text_of,
    "normalize": job_file.text_of,
    "drop_zeros": job_file.flag,
    "threshold": job_file.number,
    "top_n": job_file.count,
    "axis": axis_of,
    "transpose_a": job_file.flag,
    "transpose_b": job_file.flag,
    "workers": job_file.count,
    "scheduler": job_file.text_of,
    "scheduler_file": job_file.text_of,
    "verify": job_file.flag,
    "resume": job_file.flag,
    "steal": job_file.flag,
    "record": job_file.text_of,
    "report": job_file.text_of,
}


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Multiply; return the JSON form of what was done.

    Parameters
    ----------
    job : Job
    log : Log
        Writes the progress.

    Returns
    -------
    dict
        The result for the report.
    """
    import spdist

    report = spdist.multiply(
        job.a,
        job.b,
        job.out,
        grid=job.grid,
        **job.where(),
        resume=job.resume,
        steal=job.steal,
        check=job.verify,
        record=job.record,
        callbacks=log.callbacks(),
        semiring=job.semiring,
        mask=job.mask,
        complement=job.complement,
        triangle=job.triangle,
        epilogue=spdist.Epilogue(job.scale_rows, job.scale_columns, None, job.normalize, job.drop_zeros),
        top_n=job.top_n,
        axis=job.axis,
        threshold=job.threshold,
        transpose_a=job.transpose_a,
        transpose_b=job.transpose_b,
    )
    return report.to_json()


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return jobs.product_summary(result, "dense block" if result["block_size"] else "entry")


WORKFLOW = jobs.Workflow(__doc__, Job, READERS, ("a", "b", "mask"), lambda *job: run(*job), summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return jobs.main(WORKFLOW, argv)


if __name__ == "__main__":
    sys.exit(main())
