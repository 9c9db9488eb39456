"""Run one product as a batch job: a job file in, C and a JSON report out, lines for a log while it runs.

::

    python workflows/multiply.py JOB.yaml [--set key=value ...]

The job file is checked whole before anything starts. A signal of the batch system (SIGTERM, SIGUSR1) ends the run so
that C can be resumed, and the same command goes on from there. Relative paths count from the current folder.

Exit codes: 0 done; 1 the job failed, or C is false; 2 the job file or a matrix is wrong, nothing was written; 75
stopped by a signal before the end: run it again. workflows/multiply.yaml explains the keys.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file


def axis_of(value: object) -> int:
    """Accept 0 and 1."""
    if job_file.number(value) not in (0, 1):
        raise ValueError("is no axis; write 1 for rows or 0 for columns")
    return int(value)


FIRST_TASK = {"SLURM_ARRAY_TASK_ID": "1", "JOB_COMPLETION_INDEX": "0", "PBS_ARRAY_INDEX": "1", "LSB_JOBINDEX": "1"}
"""What batch systems call the number of a task in an array job, and the number of the first one."""


def part_of(value: object) -> str:
    """Accept K/N, and array/N in an array job: the part that has the number of the task."""
    word, _, count = job_file.text_of(value).partition("/")
    if word != "array":
        return f"{word}/{count}"
    for name, first in FIRST_TASK.items():
        if number := os.environ.get(name):
            return f"{int(number) - int(os.environ.get('SLURM_ARRAY_TASK_MIN', first)) + 1}/{count}"
    raise ValueError(f"needs an array job, which sets one of {', '.join(FIRST_TASK)}; write K/N outside of one")


@dataclass(frozen=True, kw_only=True)
class Job(job_file.ProductJob):
    """What a job file says; `multiply.yaml` explains the keys."""

    a: str
    b: str
    grid: tuple[int, int, int] | None = None
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
    axis: int = job_file.key(axis_of, 1)
    transpose_a: bool = False
    transpose_b: bool = False
    part: str | None = job_file.key(part_of, None)
    verify: bool = True
    steal: bool = False
    record: str | None = None


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Multiply; return the JSON form of what was done."""
    import spdist

    names = ("grid", "semiring", "mask", "complement", "triangle", "threshold", "top_n", "axis")
    options = job.options(*names, "transpose_a", "transpose_b", "part", "resume", "steal", "record") | {
        "check": job.verify
    }
    epilogue = spdist.Epilogue(job.scale_rows, job.scale_columns, None, job.normalize, job.drop_zeros)
    options |= {"epilogue": epilogue, "callbacks": log.callbacks()}
    return spdist.multiply(job.a, job.b, job.out, **options, **job.where()).to_json()


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return jobs.product_summary(result, "dense block" if result["block_size"] else "entry")


main = jobs.Workflow(__doc__, Job, ("a", "b", "mask"), lambda *job: run(*job), summary).main

if __name__ == "__main__":
    sys.exit(main())
