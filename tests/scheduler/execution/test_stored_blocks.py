"""Block matrices in Zarr: stored, opened, planned, multiplied, resumed and verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import spdist
from spdist.api import products as api
from spdist.cli import main
from spdist.errors import CorruptError, InputError, MatrixError
from spdist.matrices.bsr import from_rows
from spdist.scheduler.planner.plan import Plan
from tests.kernels.bsr.test_multiply_cpu import assert_is_block_product, block_matrix


@pytest.fixture
def kept(tmp_path):
    """Return a function that stores a random block matrix under a name."""

    def keep(name, nrows, ncols, size, seed=1, per_row=4.0, dtype="float64"):
        m = block_matrix(nrows, ncols, per_row, size, seed, dtype)
        return m, api.save(tmp_path / f"{name}.zarr", m.to_scipy())

    return keep


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "int16", "bool"])
def test_comes_back_by_block_rows(kept, dtype):
    m, stored = kept("a", 300, 200, (2, 3), dtype=dtype)
    assert stored.full_shape == (600, 600)
    assert stored.shape == (300, 200)
    part = spdist.open(stored.url).rows(10, 250).to_scipy()
    assert isinstance(part, sp.bsr_array)
    assert part.dtype == dtype
    np.testing.assert_array_equal(part.toarray(), m.to_scipy().tocsr()[20:500].toarray())


def test_is_laid_out_as_scipys_arrays(kept):
    m, stored = kept("a", 300, 200, (2, 3))
    group = zarr.open_group(stored.url, mode="r")
    assert dict(group.attrs)["encoding-type"] == "bsr_matrix"
    assert group.attrs["block-size"] == [2, 3]
    arrays = (group[name][:] for name in ("data", "indices", "indptr"))
    np.testing.assert_array_equal(sp.bsr_array(tuple(arrays), shape=m.shape).toarray(), m.to_scipy().toarray())


def test_info_says_blocks(kept):
    m, stored = kept("a", 30, 20, (2, 3))
    facts = api.info(stored)
    assert (facts["shape"], facts["blocks"], facts["block_size"]) == ([60, 60], m.blocks, [2, 3])
    assert (facts["nnz"], facts["dtype"]) == (m.nnz, "float64")


def test_matrices_say_in_a_line_what_they_are(kept, tmp_path):
    m, a = kept("a", 30, 20, (2, 3))
    assert repr(a) == f"<StoredMatrix 60 x 60, float64: {m.blocks:,} blocks of 2 x 3 at {tmp_path}/a.zarr>"
    numbers = api.save(tmp_path / "n.zarr", sp.eye_array(2_000, dtype="float32", format="csr"))
    assert repr(numbers) == f"<StoredMatrix 2,000 x 2,000, float32: 2,000 entries at {tmp_path}/n.zarr>"


def test_what_is_in_blocks_is_not_called_entries(kept, tmp_path, capsys):
    _, a = kept("a", 30, 30, (2, 2))
    c = tmp_path / "C.zarr"
    words = ["multiply", a.url, a.url, str(c), "--workers", "1"]
    for command in (["info", a.url], ["plan", a.url, a.url], words, [*words, "--resume"]):
        assert main(command) == 0
        said = capsys.readouterr().out
        assert "dense blocks" in said
        assert "entries" not in said
    assert f"C.zarr is finished already: {api.info(c)['blocks']:,} dense blocks" in said
    assert api.multiply(a, a, c, resume=True).block_size == (2, 2)


@pytest.mark.parametrize("grid", [None, (3, 1, 1), (2, 3, 1), (2, 2, 2)])
def test_multiply(kept, tmp_path, scheduler, grid):
    a, left = kept("a", 600, 500, (3, 2), 1)
    b, right = kept("b", 500, 400, (2, 4), 2)
    report = api.multiply(left, right, tmp_path / "c.zarr", memory_limit="64MiB", grid=grid, scheduler=scheduler)
    c = spdist.open(tmp_path / "c.zarr")
    assert_is_block_product(from_rows(c.rows(0, c.nrows)), a, b)
    assert report.nnz == c.nnz


def test_bools_add_as_or_across_the_inner_cuts(kept, tmp_path, scheduler):
    a, left = kept("a", 60, 60, (2, 2), 1, dtype="bool")
    api.multiply(left, left, tmp_path / "c.zarr", grid=(2, 3, 1), scheduler=scheduler)
    c = spdist.open(tmp_path / "c.zarr")
    assert_is_block_product(from_rows(c.rows(0, c.nrows)), a, a)


def test_blocks_and_numbers_are_refused_with_what_to_do(kept, tmp_path):
    a, left = kept("a", 60, 60, (2, 2))
    scalar = api.save(tmp_path / "s.zarr", a.to_scipy().tocsr())
    with pytest.raises(MatrixError, match="A holds blocks of 2 x 2, B numbers: both need blocks"):
        api.plan(left, scalar)
    with pytest.raises(MatrixError, match=r"B blocks of 3 x 2: both need blocks, of r x s and of s x t"):
        api.plan(left, kept("b", 60, 60, (3, 2))[1])
    with pytest.raises(InputError, match="engine='scipy' does not multiply block matrices: choose"):
        api.plan(left, left, engine="scipy", memory_limit="1GiB")
    _, integers = kept("i", 60, 60, (2, 2), dtype="int32")
    with pytest.raises(InputError, match="engine='cuda' multiplies float and complex values, not int32, in blocks"):
        api.plan(integers, integers, engine="cuda", memory_limit="1GiB")


def test_a_plan_for_gpus_needs_none(kept):
    _, left = kept("a", 600, 500, (3, 2), 1)
    _, right = kept("b", 500, 400, (2, 4), 2)
    plan = api.plan(left, right, engine="cuda", memory_limit="1MiB", host_limit="64MiB")
    assert 0 < plan.projected_memory <= 1 << 20
    assert Plan.from_json(plan.to_json()) == plan


def test_what_is_for_entries_is_refused_with_what_to_do(kept, tmp_path):
    _, a = kept("a", 20, 20, (2, 2))
    _, entries = kept("e", 20, 20, (1, 1))
    numbers = api.save(tmp_path / "n.zarr", entries.rows(0, 20).to_scipy().tocsr())
    out = tmp_path / "c.zarr"
    for call in (
        lambda: api.multiply(a, a, out, top_n=3),
        lambda: api.multiply(numbers, numbers, out, mask=a),
        lambda: api.multiply(a, a, out, transpose_b=True),
        lambda: api.reduce(a, a, "sum"),
        lambda: spdist.transpose(a, out),
    ):
        with pytest.raises(
            InputError, match=r"for matrices of entries, but .*a\.zarr is stored in blocks of 2x2: store"
        ):
            call()
    assert not out.exists()


def test_block_matrices_in_memory(kept):
    m, _ = kept("a", 20, 20, (2, 2))
    c = spdist.matmul(m, m, transpose_b=True)
    assert isinstance(c, spdist.BSR)
    dense = m.to_scipy().toarray()
    np.testing.assert_allclose(c.to_scipy().toarray(), dense @ dense.T, rtol=1e-12)


def test_a_chain_of_blocks(kept, tmp_path):
    m, a = kept("a", 20, 20, (2, 2))
    c = spdist.multi_matmul([a, a, a], out=tmp_path / "c.zarr")
    dense = m.to_scipy().toarray()
    np.testing.assert_allclose(c.rows(0, 20).to_scipy().toarray(), dense @ dense @ dense, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "complex64", "int16", "bool"])
def test_verify(kept, tmp_path, scheduler, dtype):
    _, left = kept("a", 200, 200, (2, 2), 1, dtype=dtype)
    report = api.multiply(left, left, tmp_path / "c.zarr", check=True, scheduler=scheduler)
    assert report.verification["ok"]
    wrong = spdist.open(tmp_path / "c.zarr").rows(0, 200)
    wrong.data["block"][7, 1, 0] = not wrong.data["block"][7, 1, 0] if dtype == "bool" else 99
    found = api.verify(left, left, api.save(tmp_path / "wrong.zarr", wrong))
    assert not found.ok


def test_resume(kept, tmp_path, scheduler, monkeypatch):
    from spdist.scheduler.execution import stages

    a, left = kept("a", 400, 400, (2, 2), 1)
    original, done = stages.commit, []

    def commit(context, task, *rest):
        if len(done) == 3:
            raise RuntimeError("the power failed")
        done.append(task.number)
        return original(context, task, *rest)

    monkeypatch.setitem(stages.STAGES, "commit", commit)
    with pytest.raises(spdist.SpdistError, match="the power failed"):
        api.multiply(left, left, tmp_path / "c.zarr", grid=(8, 1, 1), scheduler=scheduler)
    monkeypatch.setitem(stages.STAGES, "commit", original)
    report = api.multiply(left, left, tmp_path / "c.zarr", resume=True, scheduler=scheduler)
    assert report.state == "resumed"
    c = spdist.open(tmp_path / "c.zarr")
    assert_is_block_product(from_rows(c.rows(0, c.nrows)), a, a)


def test_a_flipped_bit_is_an_error(kept):
    _, stored = kept("a", 300, 200, (2, 3))
    chunk = next(path for path in (Path(stored.url) / "data" / "c").rglob("*") if path.is_file())
    content = bytearray(chunk.read_bytes())
    content[20] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(CorruptError, match="chunk 0 of array 'data'"):
        spdist.open(stored.url).rows(0, 10)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_values_that_compress_and_a_url(value):
    m = block_matrix(300, 300, 9.0, (4, 4), 1)
    m.data[:] = value
    stored = api.save(f"memory://blocks-{value}.zarr", m.to_scipy())
    np.testing.assert_array_equal(stored.rows(0, 300).to_scipy().toarray(), m.to_scipy().toarray())


def test_matmul_in_memory_can_be_stored(tmp_path):
    m = block_matrix(30, 30, 3.0, (2, 2), 1)
    assert_is_block_product(spdist.matmul(m, m), m, m)
    c = spdist.matmul(m.to_scipy(), m.to_scipy(), tmp_path / "c.zarr")
    assert c.blocksize == (2, 2)


def test_the_plan_counts_what_is_inside_of_blocks(kept):
    _, left = kept("a", 200, 200, (4, 4), 1)
    plan = api.plan(left, left)
    assert plan.a.block == (4, 4)
    assert type(plan).from_json(plan.to_json()) == plan
    scalar = replace(plan, a=replace(plan.a, block=(1, 1)), b=replace(plan.b, block=(1, 1)))
    assert plan.stage_seconds()["multiply"] > 2 * scalar.stage_seconds()["multiply"]


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (5, 5, 5)])
def test_nothing_to_multiply(kept, tmp_path, scheduler, shape):
    a, left = kept("a", *shape[:2], (2, 3), per_row=0.0)
    b, right = kept("b", *shape[1:], (3, 2), per_row=0.0)
    api.multiply(left, right, tmp_path / "c.zarr", check=True, scheduler=scheduler)
    c = spdist.open(tmp_path / "c.zarr")
    assert (c.full_shape, c.blocksize, c.nnz) == ((a.shape[0], b.shape[1]), (2, 2), 0)


def test_the_plan_is_printed_in_blocks(kept, capsys):
    _, left = kept("a", 200, 200, (4, 4), 1)
    assert main(["plan", left.url, left.url]) == 0
    assert "A 200 x 200 blocks of 4 x 4 with" in capsys.readouterr().out
