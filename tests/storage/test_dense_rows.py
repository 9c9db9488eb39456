"""Nonzeros of dense arrays, by rectangles: whole rows, stored chunks, columns."""

import io

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.external_sort import BUCKET_BYTES
from spdist.storage.formats import dense_rows
from spdist.storage.formats.reading import Reading, ReadOptions
from spdist.storage.formats.source import Import, Source
from spdist.storage.matrix import open_matrix

SHAPES = st.tuples(st.integers(0, 30), st.integers(0, 30))
CHUNKS = st.tuples(st.integers(1, 40), st.integers(1, 40))


def job(stage, dense=True):
    source = Source("a.x", io.BytesIO(), 1 << 20, "")
    facts = {"provenance": {}}
    return Import(source, stage, facts, reports.append, BUCKET_BYTES, ReadOptions(dense=dense), Reading("a.x", "x"))


class Reports(list):
    """Progress that was reported."""

    def append(self, done, total=1):
        super().append(done / total)


reports = Reports()


@given(SHAPES, CHUNKS, st.booleans(), st.sampled_from("?bHif"), st.sampled_from([7, 100, 1 << 20]), st.integers(0, 99))
@settings(max_examples=120, deadline=None)
def test_rectangles(tmp_path_factory, shape, chunk, by_columns, kind, entries, seed):
    rng = np.random.default_rng(seed)
    whole = (rng.integers(0, 3, shape) * rng.integers(0, 2, shape)).astype(kind)
    if kind == "f" and whole.size:
        whole.flat[0] = np.nan
    seen = np.zeros(shape, int)

    def read(rows, columns):
        seen[rows, columns] += 1
        part = whole[rows, columns]
        assert part.shape == (rows.stop - rows.start, columns.stop - columns.start)
        return np.asfortranarray(part) if by_columns else part

    target = tmp_path_factory.mktemp("dense") / "A.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_rows, "ENTRIES", entries)
        patch.setattr(dense_rows, "WHOLE_ROWS", 4 * entries)
        reports.clear()
        with staged_matrix(target, overwrite=False, steal=False) as stage:
            dense_rows.import_dense(job(stage), shape, whole.dtype, read, chunk, by_columns)
    matrix = open_matrix(target)
    assert matrix.shape == shape
    assert (seen == 1).all()
    expected = sp.csr_matrix(whole)
    got = matrix.rows(0, shape[0])
    assert got.data.dtype == whole.dtype
    np.testing.assert_array_equal(sp.csr_matrix((got.data, got.indices, got.indptr), shape).toarray(), whole)
    assert got.nnz == expected.nnz
    assert reports[-1] == 1
    assert reports == sorted(reports)


def test_rectangles_hold_whole_stored_chunks_and_no_more_than_fits():
    assert dense_rows._rectangle((10**6, 1000), (1, 1), False) == (1048, 1000)
    assert dense_rows._rectangle((10**6, 1000), (300, 1), False) == (900, 1000)
    assert dense_rows._rectangle((10**6, 10**6), (100, 100), False) == (100, 10400)
    assert dense_rows._rectangle((10**6, 10**6), (1, 1), True) == (10**6, 1)
    assert dense_rows._rectangle((10, 10**9), (1, 1), False) == (1, 1 << 20)


def test_a_dense_array_is_not_read_unasked(tmp_path):
    with (
        pytest.raises(MatrixError, match=r"a\.x::X is a dense array: pass --dense .*; sparse in this file: raw/X$"),
        staged_matrix(tmp_path / "A.zarr", overwrite=False, steal=False) as stage,
    ):
        dense_rows.check_dense(job(stage, dense=False), "a.x::X", "raw/X")
