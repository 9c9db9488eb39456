"""Operands that another program rewrites while a call reads them: what was made of them is never sealed."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.api import products as api
from spdist.api.chain import multiply_chain
from spdist.errors import CorruptError, ResumeError
from spdist.jobs import multiply as job
from spdist.options import ExecutionOptions, OutputOptions
from spdist.storage.foreign import versions
from spdist.storage.lock import hold_target
from spdist.storage.transpose import transpose
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.storage.test_foreign import write

MATRICES = {name: random_matrix(300, 300, 5, seed) for name, seed in (("A", 1), ("B", 2), ("M", 3))}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of matrices as other programs write them."""
    for name, m in MATRICES.items():
        write(tmp_path / f"{name}.zarr", m)
    return tmp_path


def double(matrix: Path) -> None:
    """Double the values of the first Zarr chunk, in its place; of a mask, forbid the first rows."""
    array = "indices" if matrix.name == "M.zarr" else "data"
    path = matrix / array / "c" / "0"
    values = np.fromfile(path, getattr(MATRICES["A"], array).dtype)
    (values[::-1] if array == "indices" else 2 * values).tofile(path)


def remove(matrix: Path) -> None:
    (matrix / "data" / "c" / "3").unlink()


def shorten(matrix: Path) -> None:
    """Write another matrix there."""
    write(matrix, random_matrix(300, 300, 3, 9))


def replace(matrix: Path) -> None:
    """Put another matrix there in one step, as other runs of spdist do."""
    spdist.save(matrix, random_matrix(300, 300, 5, 9), overwrite=True)


def multiply(folder: Path, act, scheduler: str | None = None, **options):
    """Multiply; call a function once, when some of C is made."""
    acts = [act]

    def progress(now) -> None:
        if now.blocks >= 2 and acts:
            acts.pop()()

    where = {"grid": (6, 1, 1), "scheduler": scheduler, "callbacks": spdist.Callbacks(progress=progress)} | options
    try:
        return api.multiply(folder / "A.zarr", folder / "B.zarr", folder / "C.zarr", **where)
    finally:
        assert not acts


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", ["A", "B", "M"])
def test_a_mixture_is_not_sealed(folder, scheduler, name, alone):
    api.save(folder / "C.zarr", sp.eye_array(2))
    before = names_in(folder)
    options = {"mask": folder / "M.zarr"} if name == "M" else {}
    array = "indices" if name == "M" else "data"
    with pytest.raises(CorruptError, match=f"{name}.zarr was rewritten .*Zarr chunk 0 of array '{array}', {array}/c/0"):
        multiply(
            folder, lambda: double(folder / f"{name}.zarr"), None if alone else scheduler, overwrite=True, **options
        )
    assert spdist.open(folder / "C.zarr").shape == (2, 2)
    assert names_in(folder) == before


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("act", [remove, shorten, replace])
def test_whatever_happens_to_an_operand_is_named(folder, scheduler, act, alone):
    """Reading may fail before the end; the line says then, too, that the operand was rewritten."""
    where = None if alone else scheduler
    with pytest.raises(CorruptError, match=r"A.zarr was rewritten while it was read"):
        multiply(folder, lambda: act(folder / "A.zarr"), where)
    assert "C.zarr" not in names_in(folder)


@pytest.mark.parametrize("alone", [True, False])
def test_an_operand_of_spdists_own_that_is_replaced_is_named(folder, scheduler, alone):
    shutil.rmtree(folder / "A.zarr")
    api.save(folder / "A.zarr", MATRICES["A"])
    with pytest.raises(CorruptError, match=r"A.zarr was rewritten while it was read"):
        multiply(folder, lambda: replace(folder / "A.zarr"), None if alone else scheduler)
    assert "C.zarr" not in names_in(folder)


def test_rows_of_a_mixture_are_not_resumed(folder):
    """Not even once the operand is what it was."""
    kept = (folder / "A.zarr" / "data" / "c" / "0").read_bytes()
    with pytest.raises(CorruptError):
        multiply(folder, lambda: double(folder / "A.zarr"))
    (folder / "A.zarr" / "data" / "c" / "0").write_bytes(kept)
    report = api.multiply(folder / "A.zarr", folder / "B.zarr", folder / "C.zarr", resume=True)
    assert report.state == "computed"
    assert_is_product(read(folder / "C.zarr"), MATRICES["A"], MATRICES["B"], 1e-12)


def test_a_run_that_was_stopped_is_not_resumed_with_other_operands(folder):
    def stop() -> None:
        double(folder / "A.zarr")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        multiply(folder, stop)
    with pytest.raises(ResumeError, match="product of other matrices"):
        api.multiply(folder / "A.zarr", folder / "B.zarr", folder / "C.zarr", resume=True)


def test_an_operand_with_the_same_bytes_is_the_same(folder):
    def copy() -> None:
        for path in (folder / "A.zarr").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes())
                os.utime(path, (1, 1))

    multiply(folder, copy)
    assert_is_product(read(folder / "C.zarr"), MATRICES["A"], MATRICES["B"], 1e-12)


@pytest.mark.parametrize("options", [{"transpose_a": True}, {"axis": 0, "top_n": 3}])
def test_copies_of_operands_count_as_the_operands(folder, options):
    callbacks = spdist.Callbacks(planned=lambda plan: double(folder / "A.zarr"))
    with pytest.raises(CorruptError, match=r"A.zarr was rewritten"):
        api.multiply(folder / "A.zarr", folder / "B.zarr", folder / "C.zarr", callbacks=callbacks, **options)
    assert not {name for name in names_in(folder) if name.startswith("C.zarr")}


def test_a_number_of_a_mixture_is_not_returned(folder):
    callbacks = spdist.Callbacks(planned=lambda plan: double(folder / "A.zarr"))
    with pytest.raises(CorruptError, match=r"A.zarr was rewritten"):
        spdist.reduce(folder / "A.zarr", folder / "B.zarr", "frobenius", callbacks=callbacks)


def test_a_chain_goes_by_what_its_first_product_saw(folder, monkeypatch):
    """The second product alone would take A as it is then."""
    multiply, calls = job.multiply, []

    def multiply_then_double(*args, **kwargs):
        report = multiply(*args, **kwargs)
        calls.append(args)
        if len(calls) == 1:
            double(folder / "A.zarr")
        return report

    monkeypatch.setattr(job, "multiply", multiply_then_double)
    place = folder / "A.zarr"
    with pytest.raises(CorruptError, match=r"A.zarr was rewritten"):
        multiply_chain([place] * 3, folder / "C.zarr", ExecutionOptions(), OutputOptions(), in_memory_share=0.0)
    assert len(calls) == 1
    assert not (folder / "C.zarr").exists()


def test_steps_of_an_application_may_change(folder):
    """What a call writes itself, beside a result that it holds, is no operand of others' making."""
    m = spdist.save(folder / "C.zarr.spdist-step-1", MATRICES["A"])
    with versions.watched(), hold_target(folder / "C.zarr"):
        versions.note(m)
        spdist.save(folder / "C.zarr.spdist-step-1", MATRICES["B"], overwrite=True)
        versions.check()


@pytest.mark.parametrize("what", ["transpose", "export"])
def test_other_calls_do_not_seal_mixtures(folder, what):
    call = {"transpose": transpose, "export": spdist.export_matrix}[what]
    target = folder / {"transpose": "C.zarr", "export": "C.mtx"}[what]
    with pytest.raises(CorruptError, match=r"A.zarr was rewritten"):
        call(folder / "A.zarr", target, progress=lambda done, total: double(folder / "A.zarr"))
    assert not target.exists()


def test_a_file_that_is_written_to_is_not_imported(tmp_path):
    path = tmp_path / "m.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real general\n3 3 2\n1 1 1.0\n2 2 2.0\n")

    def act(done: int, total: int) -> None:
        os.utime(path, (1, 1))

    with pytest.raises(spdist.SpdistError, match=re.escape(f"{path} was written to while it was read")):
        spdist.import_matrix(path, tmp_path / "M.zarr", progress=act)
    assert names_in(tmp_path) == {"m.mtx"}
