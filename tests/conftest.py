"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import yaml
from numba.core.caching import NullCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from spdist.api import products as api
from spdist.errors import SpdistError
from spdist.matrices.csr import CSR
from spdist.scheduler.execution import stages
from spdist.storage.matrix import StoredMatrix

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"


def has_gpu() -> bool:
    """Whether CuPy is there and sees a GPU."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount() > 0)
    except Exception:  # no CuPy, no driver, no device: each with an error of its own
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests for a GPU where there is none; the summary says so."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and CuPy: run make gpu where there is one"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep modules and tests, which stay, out of garbage collections: Numba, which makes much garbage, starts many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_tests(tmp_path_factory):
    """Keep what spdist remembers out of the user's cache folder, in subprocesses too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels_compiled_once(tmp_path_factory):
    """Let a process wait while another one compiles a kernel for the same types; Numba then finds it in its cache."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder, compile_for = tmp_path_factory.getbasetemp().parent / "compiled", Dispatcher.compile
    folder.mkdir(exist_ok=True)

    def compile_once(self: Dispatcher, signature: Any) -> Any:
        if isinstance(self._cache, NullCache):
            return compile_for(self, signature)
        key = hashlib.sha256(f"{self.py_func.__module__} {self.py_func.__qualname__} {signature}".encode()).hexdigest()
        # Numba's lock first: the thread that has it may call for this kernel from another one.
        with global_compiler_lock, (folder / key).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_for(self, signature)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "compile", compile_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def heard_interrupts():
    """Hear Ctrl-C, in subprocesses too: jobs that a shell starts in the background ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_signals():
    """Undo what a test did to signals: a worker ignores Ctrl-C, and later processes would inherit that."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def random_matrix(nrows: int, ncols: int, per_row: float, seed: int, dtype: str = "float64") -> sp.csr_matrix:
    """Return a canonical matrix with rows of very different lengths, some of them empty."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.poisson(per_row * rng.exponential(1.0, nrows)), ncols)
    rows = np.repeat(np.arange(nrows), lengths)
    columns = rng.integers(0, max(ncols, 1), len(rows))
    values = rng.integers(1, 9, len(rows)) if np.dtype(dtype).kind in "iub" else rng.standard_normal(len(rows))
    m = sp.coo_matrix((values.astype(dtype), (rows, columns)), shape=(nrows, ncols)).tocsr()
    m.sum_duplicates()
    return m


@pytest.fixture
def stored(tmp_path):
    """Return a function that stores a matrix under a name in a fresh folder."""

    def store(name: str, matrix: sp.csr_matrix) -> StoredMatrix:
        return api.save(tmp_path / f"{name}.zarr", matrix)

    return store


def load_workflow(name: str):
    """Return a script of workflows/ as a module; it imports those beside it."""
    if str(WORKFLOWS) not in sys.path:
        sys.path.append(str(WORKFLOWS))
    spec = importlib.util.spec_from_file_location(f"workflow_{name}", WORKFLOWS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def scheduler():
    """Return the address of a cluster whose workers are threads of this process: quick, and seen by monkeypatch."""
    import dask
    from distributed import LocalCluster

    from spdist.scheduler.executors.clients.local_cluster import SETTINGS

    with (
        dask.config.set(SETTINGS),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
    ):
        yield cluster.scheduler_address


def pattern_product(a: sp.csr_matrix, b: sp.csr_matrix) -> sp.csr_matrix:
    """Return the structural product: SciPy drops zero results, so the pattern needs its own oracle."""
    left, right = (sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), m.shape) for m in (a, b))
    pattern = left @ right
    pattern.sort_indices()
    return pattern


def upper(c: CSR, first: int = 0) -> CSR:
    """Return the entries on and above the diagonal; `first` is the number of the first row."""
    keep = c.indices >= np.repeat(np.arange(first, first + c.nrows), np.diff(c.indptr))
    indptr = np.concatenate([[0], np.cumsum(keep)])[c.indptr]
    return CSR(indptr, c.indices[keep], c.data[keep], c.shape)


def assert_is_product(c, a: sp.csr_matrix, b: sp.csr_matrix, rtol: float = 0.0) -> None:
    """Check a `CSR` against SciPy: pattern exactly, values exactly or to `rtol` of the row's |A||B| sum."""
    pattern = pattern_product(a, b)
    np.testing.assert_array_equal(c.indptr, pattern.indptr)
    np.testing.assert_array_equal(c.indices, pattern.indices)
    truth = (a @ b).astype(c.dtype)
    difference = abs(c.to_scipy() - truth)
    if rtol == 0.0 or not difference.nnz:
        assert difference.nnz == 0 or difference.max() == 0
        return
    bound = rtol * (abs(a) @ abs(b)).sum(axis=1).max()
    assert difference.max() <= bound


@pytest.fixture
def run_job(tmp_path, monkeypatch):
    """Return a function that runs a workflow's job in a fresh folder, in this process, and gives its report."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, code: int = 0, **keys) -> dict:
        workflow = load_workflow(name)
        monkeypatch.setattr(sys.modules["job"], "catch_signals", lambda: None)
        Path("job.yaml").write_text(yaml.safe_dump(keys))
        assert workflow.main(["job.yaml"]) == code
        return json.loads(Path("job.report.json").read_text()) if code != 2 else {}

    return call


@contextlib.contextmanager
def out_of_space():
    """Let the commits of a product fail after the sixth, and expect the run to say so."""
    commits, commit = [], stages.commit

    def failing(context, task, *rest):
        commits.append(task.number)
        if len(commits) > 6:
            raise OSError(28, "No space left on device")
        return commit(context, task, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stages.STAGES, "commit", failing)
        with pytest.raises(SpdistError, match="disk is full"):
            yield
