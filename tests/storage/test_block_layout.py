"""Matrices to blocks and back: what blocks cost, when they are refused, and the numbers of a block matrix."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.api import products as api
from spdist.cli import main
from spdist.errors import InputError
from spdist.matrices.bsr import from_rows
from spdist.matrices.csr import CSR
from spdist.storage import block_layout
from tests.conftest import random_matrix
from tests.kernels.bsr.test_multiply_cpu import block_matrix


@pytest.fixture
def npz(tmp_path):
    """Return a function that writes a matrix to a file."""

    def write(matrix):
        sp.save_npz(tmp_path / "m.npz", sp.csr_matrix(matrix))
        return tmp_path / "m.npz"

    return write


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 1), (6, 6)])
def test_cut_rows(size):
    m = random_matrix(60, 48, 5.0, 1)
    found = block_layout.cut_rows(CSR(m.indptr.astype(np.int64), m.indices, m.data, m.shape), size)
    truth = sp.bsr_array(m, blocksize=size)
    assert found.blocks == len(truth.indices)
    np.testing.assert_array_equal(found.to_scipy().toarray(), m.toarray())


@pytest.mark.parametrize("size", [(2, 3), (3, 3), (6, 1), (8, 8), (7, 5)])
def test_the_natural_size_is_found(npz, tmp_path, size):
    m = block_matrix(500, 400, 6.0, size, 1)
    source = npz(m.to_scipy().tocsr())
    stored = spdist.import_matrix(source, tmp_path / "m.zarr", block_size="auto")
    assert stored.blocksize == size
    back = from_rows(stored.rows(0, stored.nrows))
    np.testing.assert_array_equal(back.to_scipy().toarray(), m.to_scipy().toarray())
    assert not [path for path in tmp_path.iterdir() if path.name not in ("m.npz", "m.zarr")]


def test_a_size_that_does_not_pay_is_refused_with_the_figure(npz, tmp_path):
    source = npz(random_matrix(600, 600, 4.0, 1))
    with pytest.raises(InputError, match=r"blocks of 3 x 3 would hold [78]\.\d+ numbers for each entry and take"):
        spdist.import_matrix(source, tmp_path / "m.zarr", block_size=(3, 3))
    with pytest.raises(InputError, match="leave --block-size out"):
        spdist.import_matrix(source, tmp_path / "m.zarr", block_size="auto")
    with pytest.raises(InputError, match="cannot be cut into blocks of 7 x 2"):
        spdist.import_matrix(source, tmp_path / "m.zarr", block_size=(7, 2))
    assert not (tmp_path / "m.zarr").exists()


@pytest.mark.parametrize("matrix", [sp.csr_matrix((6, 6)), random_matrix(17, 19, 4.0, 1)])
def test_no_size_is_found_without_entries_or_divisors(npz, tmp_path, matrix):
    with pytest.raises(InputError, match="has no entries, or no blocks of up to 16 rows and columns divide it"):
        spdist.import_matrix(npz(matrix), tmp_path / "m.zarr", block_size="auto")
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]


@pytest.mark.parametrize("size", [(46341, 46341), (3, 1 << 31), (10**20, 1)])
def test_blocks_that_numpy_cannot_hold_are_refused(npz, tmp_path, size):
    source = npz(sp.csr_matrix((0, 0)))
    with pytest.raises(InputError, match=f"blocks of {size[0]} x {size[1]} take more than 2 GiB each"):
        spdist.import_matrix(source, tmp_path / "m.zarr", block_size=size)
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]


def test_blocks_that_are_nearly_full_pay(npz, tmp_path):
    m = block_matrix(300, 300, 5.0, (3, 3), 1).to_scipy().tocsr()
    m.eliminate_zeros()  # a third of all, and whole blocks
    stored = spdist.import_matrix(npz(m), tmp_path / "m.zarr", block_size=(3, 3))
    np.testing.assert_array_equal(stored.rows(0, stored.nrows).to_scipy().toarray(), m.toarray())


def test_costs_are_those_of_the_whole_matrix_where_it_is_small(stored):
    m = random_matrix(120, 96, 5.0, 1)
    kept = stored("m", m)
    for cost in block_layout.costs(kept, [(2, 2), (3, 4)]):
        blocks = len(sp.bsr_array(m, blocksize=cost.size).indices)
        assert cost.fill == pytest.approx(blocks * cost.size[0] * cost.size[1] / m.nnz, rel=0.15)


def test_numbers_of_a_block_matrix(tmp_path):
    m = block_matrix(200, 150, 4.0, (2, 3), 1)
    numbers = block_layout.as_numbers(api.save(tmp_path / "m.zarr", m.to_scipy()))
    truth = m.to_scipy().tocsr()
    assert (numbers.shape, numbers.nnz) == (truth.shape, truth.nnz)
    for start, stop in ((0, 400), (3, 8), (7, 7), (11, 12), (399, 400)):
        part = numbers.rows(start, stop)
        np.testing.assert_array_equal(part.indptr, truth.indptr[start : stop + 1] - truth.indptr[start])
        np.testing.assert_array_equal(part.to_scipy().toarray(), truth[start:stop].toarray())
    pieces = [numbers.data.read(at, min(at + 97, numbers.nnz)) for at in range(0, numbers.nnz, 97)]
    np.testing.assert_array_equal(np.concatenate(pieces), truth.data)


def test_export_writes_numbers(tmp_path):
    m = block_matrix(50, 40, 4.0, (2, 3), 1)
    spdist.export_matrix(api.save(tmp_path / "m.zarr", m.to_scipy()).url, tmp_path / "out.npz")
    np.testing.assert_array_equal(sp.load_npz(tmp_path / "out.npz").toarray(), m.to_scipy().toarray())


def test_on_the_command_line(npz, tmp_path, capsys):
    source, target = str(npz(block_matrix(50, 40, 4.0, (2, 3), 1).to_scipy().tocsr())), str(tmp_path / "m.zarr")
    assert main(["import", source, target, "--block-size", "2x3"]) == 0
    assert "2 x 3" in capsys.readouterr().out
    assert main(["import", source, target, "--block-size", "2by3", "--overwrite"]) == 2
    assert "write rows x columns, as in 3x3, or auto" in capsys.readouterr().err
