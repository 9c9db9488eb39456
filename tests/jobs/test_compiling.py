"""Kernels are compiled once on a machine, before workers need them, and one process at a time writes to their cache."""

from __future__ import annotations

import fcntl
import json
import logging
import threading
from dataclasses import replace

import numba
import numpy as np
import pytest

from spdist import cli
from spdist.jobs.compiling import ahead as kernels
from spdist.jobs.compiling import warm_up
from spdist.jobs.predicting import measure
from spdist.kernels.cpu import numba_compile
from spdist.kernels.product_spec import PLAIN, Epilogue, ProductSpec
from spdist.matrices.csr import CSR
from spdist.scheduler.execution.records import JobSpec
from spdist.storage.product_spec import StoredProductSpec
from tests.conftest import random_matrix


@pytest.fixture(autouse=True)
def own_notes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def job(stored):
    a = stored("A", random_matrix(30, 30, 3, 1))
    return JobSpec(a, a, "auto", False, (0, 30), (0, 30))


def test_kernels_are_compiled_ahead_once(job, monkeypatch):
    loaded = []
    load = kernels.load_cpu_kernels

    def noted(*arguments, **options):
        loaded.append(threading.get_ident())
        load(*arguments, **options)

    monkeypatch.setattr(kernels, "load_cpu_kernels", noted)
    assert kernels.compile_ahead(job).exception(timeout=100) is None
    assert len(loaded) == 1
    assert loaded[0] != threading.get_ident()
    assert kernels.compile_ahead(job).done()
    assert len(loaded) == 1
    note = next((kernels.cache_folder().parent / "compiled").iterdir())
    note.write_text(str(note))  # a cache that is gone
    kernels.compile_ahead(job).exception(timeout=100)
    assert len(loaded) == 2


def test_an_error_is_left_to_the_workers(job, monkeypatch):
    monkeypatch.setattr(kernels, "load_cpu_kernels", lambda *a, **k: 1 / 0)
    assert isinstance(kernels.compile_ahead(job).exception(timeout=100), ZeroDivisionError)
    assert not (kernels.cache_folder().parent / "compiled").exists()


@pytest.mark.parametrize("case", ["scipy", "cuda", "function"])
def test_what_no_cache_keeps_is_not_compiled_ahead(case, job, monkeypatch):
    monkeypatch.setattr(kernels, "load_cpu_kernels", lambda *a, **k: pytest.fail("compiled"))
    spec = StoredProductSpec(ProductSpec(epilogue=Epilogue(apply=lambda x: x + 1)))
    asked = replace(job, product=spec) if case == "function" else replace(job, engine=case)
    assert kernels.compile_ahead(asked).done()


def test_every_kind_of_kernel_has_a_note_of_its_own():
    def note(spec=PLAIN, dtype="float64", columns=1, merges=False, index="int32"):
        rows = [CSR(np.array([0, 1]), np.zeros(1, index), np.ones(1, dtype), (1, n)) for n in (1, columns)]
        return kernels.note_of(*rows, spec, merges=merges)

    mask = CSR(np.array([0, 1]), np.zeros(1, np.int32), np.ones(1), (1, 1))
    specs = [ProductSpec(top_n=3), ProductSpec(mask=mask), ProductSpec(mask=mask, complement=True),
             ProductSpec(triangle="upper"), ProductSpec(epilogue=Epilogue(normalize="l1"))]  # fmt: skip
    found = [note(), note(dtype="float32"), note(columns=1 << 30), note(merges=True), note(index="int64"),
             *map(note, specs)]  # fmt: skip
    assert len(set(found)) == len(found)
    assert note(ProductSpec(top_n=3)) == note(ProductSpec(top_n=5, threshold=1.0))  # one kernel


def twice(x):
    return 2 * x


def test_one_process_at_a_time_writes_to_the_cache_of_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    kernel = numba_compile.compiled(twice)
    place = tmp_path / "numba"
    folder = next(place.iterdir())
    with (folder / "twice.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process has it
        thread = threading.Thread(target=kernel, args=(3,))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        assert not list(folder.glob("*.nbi"))
    thread.join(200)
    assert len(list(folder.glob("*.nbi"))) == 1
    assert kernel(2.5) == 5.0
    assert len(list(folder.glob("*.nbc"))) == 2


def test_a_change_of_any_source_makes_the_cache_of_a_kernel_invalid(tmp_path, monkeypatch):
    """A part of the kernel may lie in another file than the kernel."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    hits = []
    for sources in ((("a.py", 1, 9),), (("a.py", 1, 9),), (("a.py", 2, 9),)):
        monkeypatch.setattr(numba_compile, "kernel_sources", lambda sources=sources: sources)
        kernel = numba_compile.compiled(twice)
        assert kernel(3) == 6
        hits.append(sum(kernel.stats.cache_hits.values()))
    assert hits == [0, 1, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine", "scipy"), "compiles nothing ahead"),
        (("--engine", "steam"), "compiles nothing ahead"),
        (("--dtype", "float64,words"), "dtype='words' is not one of numbers"),
        (("--dtype", "S3"), "dtype='S3' is not one of numbers"),
        (("--processes", "0"), "'0' is not a number of at least 1"),
    ],
)
def test_warm_up_refuses_what_it_cannot_compile(words, message, capsys):
    try:
        code = cli.main(["warm-up", *words])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_warm_up_compiles_each_kind_in_processes(monkeypatch, capsys):
    """With one kind of few columns: the kernels are in the cache already, as other tests compile them."""
    monkeypatch.setattr(warm_up, "WIDTHS", (1,))
    monkeypatch.setattr(warm_up, "OPTIONS", ("plain",))
    monkeypatch.setattr(measure, "COMMAND_SIDE", 40)
    assert cli.main(["warm-up", "--dtype", "float64", "--processes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["products"] == 1
    assert len(list((kernels.cache_folder().parent / "compiled").iterdir())) == 1


@pytest.mark.parametrize("options", ["plain", "selection", "mask"])
def test_kinds_of_warm_up(options, monkeypatch):
    made = []
    monkeypatch.setattr(warm_up, "compile_kernels", lambda a, b, spec, engine: made.append((a, b, spec)))
    warm_up._compile_case("complex64" if options == "selection" else "float32", 1 << 31, options)
    a, b, spec = made[0]
    assert (a.indices.dtype, b.indices.dtype, b.ncols) == (np.int64, np.int64, 1 << 31)
    assert (spec.selects, spec.mask is not None) == (False, options == "mask")  # complex values have no order
    monkeypatch.setattr(logging.getLogger("spdist"), "level", logging.NOTSET)
    warm_up._be_quiet()
    assert not logging.getLogger("spdist").isEnabledFor(logging.WARNING)
