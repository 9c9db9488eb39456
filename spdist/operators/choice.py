"""Choose the form that multiplies a matrix fastest on this machine, by a model or by timing candidates."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spdist.errors import InputError
from spdist.foundation.cpus import count_cpus
from spdist.kernels.spmv import cpu_gpu_split, ehyb, prepared
from spdist.kernels.spmv import csr as csr_spmv
from spdist.kernels.spmv.prepared import PreparedCsr, PreparedCusparse, PreparedEhyb, PreparedMatrix, PreparedSell
from spdist.kernels.spmv.sell import sell
from spdist.kernels.spmv.sell.format import LANES
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import is_on_gpu
from spdist.operators import estimates

if TYPE_CHECKING:
    from spdist.kernels.spmv.sell.build_gpu import Survey

CPU_LANES = 16
"""Lanes of a SELL chunk on the CPU: their sums fill two vector registers, so that no addition waits for another."""
DEFAULT_USES = 1000
"""Products for which a matrix is prepared if the caller gives no number."""
SURVEY_USES = 10
"""The rows are surveyed on the GPU from this number of uses on."""
TRIALS = 6
"""Timed products of a candidate, after an untimed one; even, because some forms alternate their direction."""
TRIAL_S, TRIAL_GAIN = 4e-3, 0.02
"""Seconds of a trial of forms on the GPU, about, and the share of a product that it saves."""
TRIED = 1.5
"""Forms that the model takes to be slower than this share of the best are not timed."""
TRIAL_PRODUCTS_S = 1e-4
"""Seconds of products that suffice to time a candidate on the GPU."""
ORDER_GAIN = {"levels": 0.7, "popular": 0.3}
"""Share of the time above the memory's that an order saves, about."""
GOOD_SHARE = 0.7
"""A form that reaches this share of the memory's bandwidth is not reordered."""
REORDERING = 200
"""Products that take about as long as a reordering; later products must save that time."""
HYBRID = "hybrid"
"""The method that shares rows between the GPU and the cores; a choice for a matrix and a machine, not a form."""

Makers = dict[str, Callable[[], PreparedMatrix]]
"""By method: a function that prepares the matrix."""

log = logging.getLogger("spdist")

BY_CALLER = "the caller's choice"
"""Reason for a method that the caller named."""


class Dtypes(NamedTuple):
    """Dtypes of an operator."""

    sums: np.dtype[Any]
    """In which products are summed."""
    stored: np.dtype[Any]
    """In which values are stored."""


class Choice(NamedTuple):
    """A prepared matrix, and why its form was chosen."""

    prepared: PreparedMatrix
    method: str
    """As the argument of `prepare.operator`."""
    why: str
    """How the method was chosen, for people."""
    threads: int
    """Threads on the CPU; for "hybrid", threads that multiply next to the GPU."""


def prepare_by(m: CSR, method: str, threads: int, makers: Makers) -> Choice:
    """Prepare a matrix by a given method.

    `makers`: as `makers_for` returns them.
    Raises `InputError` if there is no such method for this matrix.
    """
    make = makers.get(method)
    if make is None:
        gpu = is_on_gpu(m.data)
        where, suited = "GPU" if gpu else "CPU", ", ".join(["auto", *makers, *([HYBRID] if gpu else [])])
        if method == HYBRID:
            suited += "; or pass a matrix of CuPy's, whose rows a GPU and the cores can share"
        raise InputError(f"method {method!r} is not for this matrix on the {where}: choose one of {suited}")
    return Choice(make(), method, BY_CALLER, threads)


def makers_for(m: CSR, threads: int, stored: np.dtype[Any]) -> Makers:
    """Return the methods that suit a matrix on the device that holds it.

    `threads`: threads that convert the matrix on the CPU.
    `stored`: dtype in which values are stored.
    Returns by method: a function without arguments that prepares the matrix.
    """
    gpu, square = is_on_gpu(m.data), m.nrows == m.ncols
    options: dict[str, Any] = {"lanes": LANES if gpu else CPU_LANES, "dtype": stored, "threads": threads}
    converted = m if stored == m.dtype else CSR(m.indptr, m.indices, m.data.astype(stored), m.shape)
    made: Makers = {"sell": lambda: PreparedSell(sell.build(m, **options))}
    if square:
        made["levels"] = lambda: prepared.by_levels(m, **options)
    made["popular"] = lambda: prepared.by_popularity(m, **options)
    if gpu:
        if square:
            made["ehyb"] = lambda: PreparedEhyb(ehyb.build(m, dtype=stored))
        made["csr"] = lambda: PreparedCsr(converted, csr_spmv.row_width(m.nrows, m.nnz))
        if stored == m.dtype and m.indptr.dtype == m.indices.dtype:
            made["cusparse"] = lambda: PreparedCusparse(m)
            made["cusparse_coo"] = lambda: PreparedCusparse(m, with_rows=True)
    else:
        made["scipy"] = lambda: PreparedCsr(converted)
    return made


@dataclass
class Trial:
    """Candidates that have been prepared and timed."""

    m: CSR
    dtype: np.dtype[Any]  # dtype of the vectors
    threads: int
    # by name: seconds of a product, and the prepared matrix
    found: dict[str, tuple[float, PreparedMatrix]] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], PreparedMatrix]) -> float:
        """Prepare and time a candidate; return the seconds of a product.

        `make`: prepares the matrix.
        """
        matrix = make()
        seconds = (gpu_seconds if is_on_gpu(self.m.data) else cpu_seconds)(matrix, self.m, self.dtype, self.threads)
        self.found[name] = seconds, matrix
        return seconds

    def best(self) -> Choice:
        """Return the fastest candidate."""
        name = min(self.found, key=lambda key: self.found[key][0])
        return Choice(self.found[name][1], name, f"auto: fastest of {self.report()}", self.threads)

    def report(self) -> str:
        """List all times, fastest first, for people."""
        ordered = sorted(self.found.items(), key=lambda item: item[1][0])
        return ", ".join(f"{name} {1e6 * seconds:,.1f} us" for name, (seconds, _) in ordered)


def choose(m: CSR, dtypes: Dtypes, makers: Makers, uses: int, threads: int) -> Choice:
    """Prepare a matrix by "auto": in the form whose preparation and `uses` products take least.

    `makers`: as `makers_for` returns them.
    """
    if not m.nnz:
        name = "sell" if max(m.shape) < 2**31 else "csr" if is_on_gpu(m.data) else "scipy"
        found = Choice(makers[name](), name, "auto: there is nothing to multiply", threads)
    else:
        found = (_choose_on_gpu if is_on_gpu(m.data) else _choose_on_cpu)(m, dtypes, makers, uses, threads)
    log.debug("%s: %s", found.method, found.why)
    return found


def _choose_on_cpu(m: CSR, dtypes: Dtypes, makers: Makers, uses: int, threads: int) -> Choice:
    """Leave the matrix as it is for few uses; take the fastest form of a trial for many."""
    costs = estimates.on_cpu(m.nnz, threads)
    if costs["scipy"].total(uses) <= costs["sell"].total(uses):
        times = ", ".join(f"{key} {1e6 * cost.product:,.1f} us" for key, cost in costs.items())
        after = estimates.repaid_after(costs["sell"], costs["scipy"])
        repaid = f"; sell would repay its preparation after {after:,.0f} products" if after < math.inf else ""
        why = f"auto: the best for {uses:,} uses by the model, {times}{repaid}"
        return Choice(makers["scipy"](), "scipy", why, threads)
    trial = Trial(m, dtypes.sums, threads)
    for name in ("scipy", "sell", "bsr"):
        if name in makers:
            trial.add(name, makers[name])
    return trial.best()


def _choose_on_gpu(m: CSR, dtypes: Dtypes, makers: Makers, uses: int, threads: int) -> Choice:
    """Take the form that the model expects to be fastest; time others too if they may repay that."""
    plain = "cusparse" if "cusparse" in makers else "csr"
    if uses < SURVEY_USES or max(m.shape) >= 2**31:
        return Choice(makers[plain](), plain, f"auto: {uses:,} uses do not repay a look at the rows", threads)
    survey = sell.survey_rows(m)
    costs = estimates.on_gpu(m, survey, dtypes.stored.itemsize)
    costs = {name: cost for name, cost in costs.items() if name in makers}
    name = min(costs, key=lambda key: costs[key].total(uses))
    why = f"auto: the best for {uses:,} uses by the model, {estimates.compared(name, costs, uses)}"
    if name != "sell":
        return Choice(makers[name](), name, why, threads)
    made = PreparedSell(sell.build(m, dtype=dtypes.stored, survey=survey))
    trial = Trial(m, dtypes.sums, threads)
    _try_orders(trial, made, survey, makers, uses)
    if uses * costs[name].product * TRIAL_GAIN > TRIAL_S:
        _try_forms(trial, made, survey, costs, makers)
    return trial.best() if trial.found else Choice(made, name, why, threads)


def split(m: CSR, dtype: np.dtype[Any], stored: np.dtype[Any], uses: int, threads: int | None) -> Choice:
    """Prepare a matrix for the GPU and the cores together, or for the GPU alone if that is as fast.

    `m`: on the GPU.
    `dtype, stored`: dtypes of sums, and of stored values.
    `uses`: expected products.
    `threads`: by default one per core that this process may use.
    """
    count = threads or count_cpus()

    def on_gpu(rows: CSR) -> PreparedMatrix:
        return choose(rows, Dtypes(dtype, stored), makers_for(rows, count, stored), uses, count).prepared

    def on_host(rows: CSR) -> PreparedMatrix:
        return makers_for(rows, count, stored)["sell"]()

    whole = on_gpu(m)

    def alone() -> float:
        return gpu_seconds(whole, m, dtype, count)

    found, why = cpu_gpu_split.prepare(m, cpu_gpu_split.Forms(on_gpu, on_host, alone, dtype, count))
    log.info("hybrid: %s", why)
    return Choice(found or whole, HYBRID, f"{HYBRID}: {why}", count)


def _try_orders(trial: Trial, made: PreparedSell, survey: Survey, makers: Makers, uses: int) -> None:
    """Time another order of rows and columns, if reads of x are so slow that it may repay its preparation."""
    m, hubs = trial.m, int(survey.counts[-1])
    name = "popular" if hubs else "levels"  # with a few very long rows there are no levels
    moved = made.nbytes + trial.dtype.itemsize * sum(m.shape)
    if name not in makers or moved <= _cache(estimates.device()) or uses * ORDER_GAIN[name] < REORDERING:
        return
    seconds = trial.add("sell", lambda: made)
    slower = seconds - moved / estimates.bandwidth(estimates.device())
    if slower > (1 - GOOD_SHARE) * seconds and uses * ORDER_GAIN[name] * slower > REORDERING * seconds:
        trial.add(name, makers[name])


def _try_forms(
    trial: Trial, made: PreparedSell, survey: Survey, costs: dict[str, estimates.Costs], makers: Makers
) -> None:
    """Time forms that keep the order of rows and are not much slower by the model; more and less shared rows too."""

    def build(rows: Survey) -> PreparedSell:
        return PreparedSell(sell.build(trial.m, dtype=made.matrix.dtype, survey=rows))

    if "sell" not in trial.found:
        trial.add("sell", lambda: made)
    for most in (survey.sharing.most // 2, survey.sharing.most * 2):
        other = replace(survey, sharing=survey.sharing._replace(most=most))
        if other.rest != survey.rest:
            trial.add(f"sell of {most} entries a lane", functools.partial(build, other))
    for name, cost in costs.items():
        if name != "sell" and cost.product < TRIED * costs["sell"].product:
            trial.add(name, makers[name])


def cpu_seconds(matrix: PreparedMatrix, m: CSR, dtype: np.dtype[Any], threads: int) -> float:
    """Return the least seconds of several products on the CPU.

    `matrix`: A prepared form of `m`, in host memory.
    `m`: only its shape is read.
    `dtype`: dtype of x.
    """
    x = np.ones(m.ncols, dtype)
    matrix.multiply(x, None, threads)
    times = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        matrix.multiply(x, None, threads)
        times.append(time.perf_counter() - begin)
    return min(times)


def gpu_seconds(matrix: PreparedMatrix, m: CSR, dtype: np.dtype[Any], threads: int) -> float:
    """Return the mean seconds of a product on the GPU, without launch times: in a CUDA graph.

    `matrix`: A prepared form of `m`, on the GPU.
    `m`: only its shape is read.
    `dtype`: dtype of x and y.
    `threads`: threads of the host; forms that the GPU alone multiplies ignore it.
    """
    import cupy

    x, y = cupy.ones(m.ncols, dtype), cupy.empty(m.nrows, dtype)
    least = matrix.nbytes / estimates.bandwidth(estimates.device())
    trials = TRIALS if TRIALS * least < TRIAL_PRODUCTS_S else 2
    stream, begin, end = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()

    def multiply_all() -> None:
        for _ in range(trials):
            matrix.multiply(x, y, threads)

    cupy.cuda.get_current_stream().synchronize()
    with stream:
        matrix.multiply(x, y, threads)
        stream.begin_capture()
        multiply_all()
        launch = stream.end_capture().launch
        launch()
        begin.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / trials


@functools.cache
def _cache(number: int) -> int:
    """Return the bytes of a device's L2 cache."""
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(38, number))
