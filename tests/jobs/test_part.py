"""A product made in parts by several runs, against SciPy; a C that lies in parts, as an operand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import CorruptError, InputError, MatrixError, ResumeError
from spdist.jobs.part import part_of
from spdist.matrices.csr import CSR
from spdist.storage.parts.rows import part_rows, rows_of
from tests.support.strategies import csr_pairs

PARTS = 3


@pytest.fixture
def operands(tmp_path: Path) -> tuple[Path, Path, Any]:
    """Return A with an empty stretch and a long row, B, and their product."""
    rng = np.random.default_rng(5)
    a = sp.random_array((3000, 800), density=0.01, rng=rng, format="lil")
    a[100:1200] = 0
    a[1500] = 1.0
    b = sp.random_array((800, 700), density=0.05, rng=rng, format="csr")
    a = sp.csr_array(a)
    a.eliminate_zeros()
    names = [f"row {i}" for i in range(3000)]
    spdist.save(tmp_path / "A.zarr", a, row_names=names)
    spdist.save(tmp_path / "B.zarr", b)
    c = sp.csr_array(a @ b)
    c.sort_indices()
    return tmp_path / "A.zarr", tmp_path / "B.zarr", c


def make(a: Any, b: Any, c: Any, count: int = PARTS, **options: Any) -> list[spdist.Report]:
    """Make all parts, the last first."""
    return [spdist.multiply(a, b, c, part=(k, count), memory_limit="256MiB", **options) for k in range(count, 0, -1)]


def is_equal(found: Any, expected: Any) -> bool:
    """Whether two matrices have the same pattern, and values within rounding."""
    found, expected = sp.csr_array(found), sp.csr_array(expected)
    same = np.array_equal(found.indptr, expected.indptr) and np.array_equal(found.indices, expected.indices)
    return same and np.allclose(found.data, expected.data, rtol=1e-12)


def test_parts_make_the_product(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, c = operands
    reports = make(a, b, tmp_path / "C.zarr", check=True)
    assert [one.missing for one in reports] == [[1, 2], [1], []]
    assert [one.part for one in reports] == ["3/3", "2/3", "1/3"]
    assert sum(one.nnz for one in reports) == c.nnz
    whole = spdist.open(tmp_path / "C.zarr")
    assert is_equal(whole.to_scipy(), c)
    assert whole.row_names is not None
    assert whole.row_names[-1] == "row 2999"
    assert spdist.verify(a, b, whole).ok
    found = spdist.check(tmp_path / "C.zarr")
    assert found.ok
    assert found.sealed


@settings(max_examples=40, deadline=None)
@given(csr_pairs(), st.integers(1, 6))
def test_rows_and_parts_are_the_rows_of_the_whole(pair: tuple[CSR, CSR], count: int) -> None:
    a, b = pair
    stored = spdist.save("memory://parts/A.zarr", a, overwrite=True)
    spdist.save("memory://parts/B.zarr", b, overwrite=True)
    cuts = [part_rows(stored, k, count) for k in range(1, count + 1)]
    assert [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert (cuts[0][0], cuts[-1][1]) == (0, a.nrows)
    for start, stop in cuts:
        view = rows_of(stored, start, stop)
        part, whole = view.rows(0, view.nrows), stored.rows(start, stop)
        assert part.shape == whole.shape
        for one, other in zip((part.indptr, part.indices, part.data), (whole.indptr, whole.indices, whole.data),
                              strict=True):  # fmt: skip
            np.testing.assert_array_equal(one, other)


@settings(max_examples=15, deadline=None)
@given(pair=csr_pairs(), count=st.integers(1, 5))
def test_any_number_of_parts(pair: tuple[CSR, CSR], count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    a, b = pair
    folder = tmp_path_factory.mktemp("parts")
    left, right = spdist.save(folder / "A.zarr", a), spdist.save(folder / "B.zarr", b)
    make(left, right, folder / "C.zarr", count)
    spdist.multiply(left, right, folder / "D.zarr")
    found, expected = (spdist.open(folder / name).to_scipy() for name in ("C.zarr", "D.zarr"))
    assert found.shape == expected.shape
    assert is_equal(found, expected)


def test_masks_cuts_and_factors_of_rows(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, _ = operands
    mask = sp.random_array((3000, 700), density=0.3, rng=np.random.default_rng(1), format="csr")
    spdist.save(tmp_path / "M.zarr", mask)
    options: dict[str, Any] = {
        "mask": tmp_path / "M.zarr", "top_n": 4, "epilogue": spdist.Epilogue(rows=np.arange(3000.0) + 1),
    }  # fmt: skip
    make(a, b, tmp_path / "C.zarr", check=True, **options)
    spdist.multiply(a, b, tmp_path / "D.zarr", **options)
    assert is_equal(spdist.open(tmp_path / "C.zarr").to_scipy(), spdist.open(tmp_path / "D.zarr").to_scipy())


def test_a_matrix_in_parts_is_an_operand(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, c = operands
    make(a, b, tmp_path / "C.zarr")
    turned = spdist.transpose(tmp_path / "C.zarr", tmp_path / "T.zarr")
    assert is_equal(turned.to_scipy(), sp.csr_array(c.T))
    for workers in (None, 1):
        spdist.multiply(tmp_path / "T.zarr", tmp_path / "C.zarr", tmp_path / "D.zarr", workers=workers, overwrite=True,
                        check=True)  # fmt: skip
    make(tmp_path / "C.zarr", tmp_path / "T.zarr", tmp_path / "E.zarr", 2, check=True, workers=1)
    expected = sp.csr_array(c @ c.T)
    expected.sort_indices()
    assert is_equal(spdist.open(tmp_path / "E.zarr").to_scipy(), expected)
    whole = spdist.open(tmp_path / "C.zarr")
    assert is_equal(whole[1190:1210], c[1190:1210])
    np.testing.assert_allclose(whole @ np.ones(700), c @ np.ones(700))


@pytest.mark.gpu
def test_parts_on_a_gpu(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, c = operands
    make(a, b, tmp_path / "C.zarr", engine="cuda", check=True)
    assert is_equal(spdist.open(tmp_path / "C.zarr").to_scipy(), c)
    spdist.transpose(tmp_path / "C.zarr", tmp_path / "T.zarr")
    for left, right in (("T.zarr", "C.zarr"), ("C.zarr", "T.zarr")):
        spdist.multiply(
            tmp_path / left, tmp_path / right, tmp_path / "D.zarr", engine="cuda", overwrite=True, check=True
        )
    mask = sp.random_array((3000, 700), density=0.3, rng=np.random.default_rng(1), format="csr")
    spdist.save(tmp_path / "M.zarr", mask)
    make(a, b, tmp_path / "E.zarr", engine="cuda", mask=tmp_path / "M.zarr", top_n=4)
    spdist.multiply(a, b, tmp_path / "F.zarr", mask=tmp_path / "M.zarr", top_n=4)
    assert is_equal(spdist.open(tmp_path / "E.zarr").to_scipy(), spdist.open(tmp_path / "F.zarr").to_scipy())


def test_it_is_imported_and_appended_to_as_one(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, c = operands
    make(a, b, tmp_path / "C.zarr")
    spdist.import_matrix(tmp_path / "C.zarr", tmp_path / "one.zarr")
    assert is_equal(spdist.open(tmp_path / "one.zarr").to_scipy(), c)
    assert not list((tmp_path / "one.zarr").glob("*-of-*"))
    more = sp.csr_array(np.eye(2, 700))
    spdist.append(tmp_path / "C.zarr", more, row_names=["x", "y"])
    assert is_equal(spdist.open(tmp_path / "C.zarr").to_scipy(), sp.vstack([c, more]))
    assert spdist.check(tmp_path / "C.zarr").ok


def test_a_part_resumes_and_a_whole_c_is_done(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, c = operands
    out = tmp_path / "C.zarr"
    spdist.multiply(a, b, out, part="2/3")
    with pytest.raises(MatrixError, match="unfinished product in parts, of which 2-of-3 are begun"):
        spdist.open(out)
    with pytest.raises(InputError, match="exists"):
        spdist.multiply(a, b, out, part="2/3")
    assert spdist.multiply(a, b, out, part="2/3", resume=True).state == "already finished"
    with pytest.raises(ResumeError, match="other matrices or options"):
        spdist.multiply(a, b, out, part="2/3", resume=True, threshold=0.5)
    make(a, b, out, resume=True)
    assert spdist.multiply(a, b, out, resume=True).state == "already finished"
    with pytest.raises(ResumeError, match="other matrices or options"):
        spdist.multiply(a, b, out, part="1/3", threshold=0.5)
    spdist.multiply(a, b, out, overwrite=True)
    assert is_equal(spdist.open(out).to_scipy(), c)
    assert not list(out.glob("*-of-*"))


def test_parts_of_two_products_are_not_joined(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, _ = operands
    spdist.multiply(a, b, tmp_path / "C.zarr", part="1/2", threshold=0.5)
    with pytest.raises(ResumeError, match="1-of-2 is a product of other matrices or options"):
        spdist.multiply(a, b, tmp_path / "C.zarr", part="2/2")
    with pytest.raises(MatrixError, match="unfinished product in parts"):
        spdist.open(tmp_path / "C.zarr")


KILLED = """
import sys
import spdist
from tests.support.kill_at import kill_at

kill_at("spdist.storage.writer.Layout.write_entries", 2, "after")
spdist.multiply(*sys.argv[1:4], part="1/2", grid=(8, 1, 1))
"""


def test_a_killed_part_goes_on(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, c = operands
    out = tmp_path / "C.zarr"
    words = [sys.executable, "-c", KILLED, str(a), str(b), str(out)]
    assert subprocess.run(words, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert spdist.multiply(a, b, out, part="1/2", resume=True, check=True).state in ("resumed", "computed")
    assert spdist.multiply(a, b, out, part="2/2").missing == []
    assert is_equal(spdist.open(out).to_scipy(), c)


def test_parts_made_at_the_same_time(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, c = operands

    def run(k: int) -> dict[str, Any]:
        words = ["multiply", str(a), str(b), str(tmp_path / "C.zarr"), "--part", f"{k}/4", "--json"]
        done = subprocess.run([sys.executable, "-m", "spdist", *words], check=True, capture_output=True)
        return dict(json.loads(done.stdout))

    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(run, range(1, 5)))
    assert [] in [one["missing"] for one in reports]
    assert is_equal(spdist.open(tmp_path / "C.zarr").to_scipy(), c)


def test_another_part_in_its_place_is_noticed(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, _ = operands
    out = tmp_path / "C.zarr"
    make(a, b, out)
    (out / "1-of-3").rename(out / "kept")
    (out / "2-of-3").rename(out / "1-of-3")
    (out / "kept").rename(out / "2-of-3")
    with pytest.raises(CorruptError, match="1-of-3: is not the part"):
        spdist.open(out)
    assert not spdist.check(out).ok


def test_a_damaged_chunk_of_a_part_is_named(operands: tuple[Path, Path, Any], tmp_path: Path) -> None:
    a, b, _ = operands
    make(a, b, tmp_path / "C.zarr")
    chunk = tmp_path / "C.zarr/2-of-3/indices/c/0"
    content = bytearray(chunk.read_bytes())
    content[20] ^= 1
    chunk.write_bytes(content)
    problems = spdist.check(tmp_path / "C.zarr").problems
    assert len(problems) == 1
    assert "2-of-3" in problems[0]
    with pytest.raises(CorruptError, match="2-of-3"):
        spdist.open(tmp_path / "C.zarr").to_scipy()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"triangle": "upper"}, "needs all rows"),
        ({"transpose_a": True}, "spdist transpose"),
        ({"overwrite": True}, "remove it first"),
        ({"axis": 0, "top_n": 2}, "axis=0"),
    ],
)
def test_what_needs_all_rows_is_refused(
    options: dict[str, Any], reason: str, operands: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    a, b, _ = operands
    with pytest.raises(InputError, match=reason):
        spdist.multiply(a, b, tmp_path / "C.zarr", part="1/2", **options)
    assert not (tmp_path / "C.zarr").exists()


@pytest.mark.parametrize("value", ["0/3", "4/3", "3", "a/b", "1/2/3", (1,), (1.5, 2), "-1/2", 3, (True, 2)])
def test_a_part_is_k_of_n(value: object) -> None:
    with pytest.raises(InputError, match="part K of N"):
        part_of(value)


def test_forms_of_a_part() -> None:
    assert part_of(" 3 / 8") == part_of((3, 8)) == part_of([3, 8]) == (3, 8)
