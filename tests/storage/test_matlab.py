"""MATLAB's files: SciPy is the oracle of those before version 7.3; h5py writes what MATLAB 7.3 would."""

import io
import json
import logging
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.io.matlab
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError
from spdist.storage.formats.hdf5 import matlab5, process
from spdist.storage.formats.hdf5.description import RefusedError, Settings
from spdist.storage.import_export import import_matrix

DATA = Path(scipy.io.matlab.__file__).parent / "tests" / "data"
FILES = sorted(set(DATA.glob("*.mat")) - {DATA / "testhdf5_7.4_GLNX86.mat", DATA / "debigged_m4.mat"})

A = sp.random(30, 20, 0.2, "csc", random_state=0)
ZEROS = sp.csc_matrix(([1.0], ([3], [4])), (30, 20))


def read(source, tmp_path, **options):
    """Import a file; return its matrix as SciPy's, and what was said of it."""
    shutil.rmtree(tmp_path / "out.zarr", ignore_errors=True)
    matrix = import_matrix(source, tmp_path / "out.zarr", **options)
    block = matrix.rows(0, matrix.nrows)
    attributes = json.loads((tmp_path / "out.zarr" / "zarr.json").read_text())["attributes"]
    said = attributes["spdist"]["provenance"]["read"]
    return sp.csr_array((block.data, block.indices, block.indptr), shape=matrix.shape), said


def assert_same(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.toarray(), expected.toarray())


# -- before 7.3 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_problem_of_suitesparse(tmp_path, compressed):
    problem = {"A": A, "Zeros": ZEROS, "name": "Group/matrix", "id": 7.0, "b": np.ones((30, 1)), "aux": {"c": 1.0}}
    scipy.io.savemat(tmp_path / "a.mat", {"Problem": problem, "other": A}, do_compression=compressed)
    for inner in ("", "::Problem.A"):
        found, said = read(f"{tmp_path}/a.mat{inner}", tmp_path)
        assert_same(found, A)
        assert said.startswith("read as a MATLAB file; Problem.A; no names; left out: ")
        assert said.endswith("explicit zeros (Problem.Zeros), Problem.b, Problem.aux")
    if compressed:
        return
    found, said = read(f"{tmp_path}/a.mat::Problem.Zeros", tmp_path)
    assert_same(found, ZEROS)
    assert said == "read as a MATLAB file; Problem.Zeros; no names"
    assert_same(read(f"{tmp_path}/a.mat::other", tmp_path)[0], A)
    assert_same(read(f"{tmp_path}/a.mat::Problem.b", tmp_path, dense=True)[0], sp.csr_array(problem["b"]))
    for inner, what in (
        ("Problem.C", "no struct with a field 'C'; its fields: A, Zeros, name, id, b, aux"),
        ("Problem.name", "Problem.name is no matrix of numbers but ndarray"),
        ("Problem", "Problem is no matrix of numbers"),
        ("none", r"there is no variable 'none'; there is Problem \(struct 1 x 1\), other \(sparse 30 x 20\)"),
        ("Problem.b", r"Problem\.b is a dense array: pass --dense \(dense=True\).*sparse in this file: other"),
    ):
        with pytest.raises(MatrixError, match=what):
            import_matrix(f"{tmp_path}/a.mat::{inner}", tmp_path / "none.zarr")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("i1", "f8"), ("u1", "f8"), ("i4", "f8"), ("f4", "f8"), ("f8", "f8"), ("?", "?"), ("c8", "c8"), ("i8", "i8"),
    ],
)  # fmt: skip
def test_values_are_matlab_s(tmp_path, stored, expected):
    """Of a sparse matrix MATLAB knows doubles only, which a file may store as bytes."""
    values = (10 * A).astype(stored)
    scipy.io.savemat(tmp_path / "a.mat", {"a": values})
    assert_same(read(tmp_path / "a.mat", tmp_path)[0], values.astype(expected))


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_version_4(tmp_path, dtype):
    scipy.io.savemat(tmp_path / "a.mat", {"a": A.astype(dtype), "b": np.ones((2, 3))}, format="4")
    found, said = read(tmp_path / "a.mat", tmp_path)
    assert_same(found, A.astype(dtype))
    assert said.endswith("left out: variable b")
    assert_same(read(f"{tmp_path}/a.mat::b", tmp_path, dense=True)[0], sp.csr_array(np.ones((2, 3))))


def test_which_variable(tmp_path):
    path = tmp_path / "a.mat"
    dense = np.array([[0.0, np.nan], [2, 0]])
    scipy.io.savemat(path, {"a": A, "b": A.astype(bool), "x": dense})
    with pytest.raises(MatrixError, match=r"several sparse matrices: a, b; name one, as in FILE\.mat::a$"):
        import_matrix(path, tmp_path / "none.zarr")
    scipy.io.savemat(path, {"x": dense, "y": dense, "s": {"t": A}})
    with pytest.raises(MatrixError, match=r"no sparse matrix, but dense ones: x, y; .* with --dense"):
        import_matrix(path, tmp_path / "none.zarr")
    assert_same(read(f"{path}::s.t", tmp_path)[0], A)
    scipy.io.savemat(path, {"x": dense, "s": "text"})
    with pytest.raises(MatrixError, match=r"a\.mat::x is a dense array: pass --dense"):
        import_matrix(path, tmp_path / "none.zarr")
    assert_same(read(path, tmp_path, dense=True)[0], sp.csr_array(dense))
    scipy.io.savemat(path, {"s": {"t": A}})
    with pytest.raises(MatrixError, match=r"there is s \(struct 1 x 1\); a field of a struct is named"):
        import_matrix(path, tmp_path / "none.zarr")
    scipy.io.savemat(path, {})
    with pytest.raises(MatrixError, match="it holds no variables"):
        import_matrix(path, tmp_path / "none.zarr")


def described(path):
    """Return what the child process would say of a file; None if it refuses it."""
    try:
        return matlab5.describe(io.BytesIO(path.read_bytes()), Settings("", "", True, {}))
    except RefusedError:
        return None


def whole(found):
    """Return a described matrix as an array."""
    arrays = {name: array.read((slice(None),) * len(array.shape)) for name, array in found.arrays.items()}
    if found.kind == "dense":
        return arrays["values"]
    if found.kind == "columns":
        return sp.csc_array((arrays["data"], arrays["indices"], arrays["indptr"]), found.shape).toarray()
    return sp.coo_array((arrays["data"], (arrays["rows"], arrays["columns"])), found.shape).toarray()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_of_scipy(path):
    """Each is read as SciPy reads it, or refused; in this process, as each child would take a quarter of a second."""
    try:
        values = scipy.io.loadmat(path)
    except Exception as error:  # whatever SciPy raises on a malformed file
        with pytest.raises(type(error)):
            described(path)
        return
    found = described(path)
    matrices = {
        name: each for name, each in values.items() if getattr(each, "ndim", 0) == 2 and each.dtype.kind in "biufc"
    }
    matrices.pop("__function_workspace__", None)
    assert (found is not None) == (len(matrices) == 1)
    if found is not None:
        value = matrices[found.inner]
        np.testing.assert_array_equal(whole(found), value.toarray() if sp.issparse(value) else value)


def test_dense_values_are_matlab_s():
    """Doubles that the file stores as bytes; complex numbers keep their imaginary parts."""
    assert described(DATA / "testmatrix_7.4_GLNX86.mat").arrays["values"].dtype == "f8"
    assert described(DATA / "testcomplex_7.4_GLNX86.mat").arrays["values"].dtype == "c16"


def test_memory_grows_with_the_file(tmp_path):
    """A file of 100 bytes that claims 3 GiB; what a larger file may take."""
    shutil.copy(DATA / "debigged_m4.mat", tmp_path / "a.mat")
    with pytest.raises(MatrixError, match=r"read whole, and this one takes more than 512 MiB, .*-v7\.3, or as \.mtx"):
        import_matrix(tmp_path / "a.mat", tmp_path / "a.zarr", dense=True)
    assert process.growth_for(0) == 512 << 20
    assert process.growth_for(10 << 20) == (512 + 80) << 20
    assert process.growth_for(1 << 50) < 1 << 50


# -- 7.3 ---------------------------------------------------------------------------------------------------------------


def matlab_class(item, name):
    item.attrs["MATLAB_class"] = np.bytes_(name)


def put_sparse(group, name, matrix, kind="double"):
    """Write a sparse matrix as MATLAB 7.3 does."""
    matrix = matrix.tocsc()
    made = group.create_group(name)
    made.attrs["MATLAB_sparse"] = np.uint64(matrix.shape[0])
    matlab_class(made, kind)
    made["jc"] = matrix.indptr.astype("u8")
    if matrix.nnz:
        made["ir"] = matrix.indices.astype("u8")
        data = matrix.data
        if data.dtype.kind == "c":
            data = data.view([("real", data.real.dtype), ("imag", data.real.dtype)])
        made.create_dataset("data", data=data.astype("u1") if kind == "logical" else data)


def put_dense(group, name, values, kind="double", **options):
    """Write a dense array: HDF5 has its dimensions in reverse order."""
    made = group.create_dataset(name, data=np.ascontiguousarray(values.T), **options)
    matlab_class(made, kind)


def write_73(path, write):
    """Write a file with MATLAB's block of 512 bytes before HDF5."""
    with h5py.File(path, "w", userblock_size=512) as file:
        write(file)
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\0\2IM")


def test_problem_of_suitesparse_73(tmp_path):
    def write(file):
        problem = file.create_group("Problem")  # without MATLAB_class, as other programs write it
        put_sparse(problem, "A", A)
        put_sparse(problem, "Zeros", ZEROS)
        put_dense(problem, "b", np.ones((30, 1)))
        put_dense(problem, "name", np.array([[77, 65]], "u2"), "char")
        put_sparse(file, "other", A)
        file.create_group("#refs#")

    path = tmp_path / "a.mat"
    write_73(path, write)
    for inner in ("", "::Problem.A"):
        found, said = read(f"{path}{inner}", tmp_path)
        assert_same(found, A)
        assert said == (
            "read as a MATLAB file; Problem.A; no names; left out: explicit zeros (Problem.Zeros), Problem.b"
        )
    assert_same(read(f"{path}::Problem.Zeros", tmp_path)[0], ZEROS)
    assert_same(read(f"{path}::Problem.b", tmp_path, dense=True)[0], sp.csr_array(np.ones((30, 1))))
    for inner, what in (
        ("Problem.name", "Problem.name is no matrix of numbers but char; sparse in this file: other"),
        ("Problem", "Problem is no matrix of numbers but an object"),
        ("none.A", "there is no variable 'none.A'; there is Problem, other"),
        ("Problem.b", r"Problem\.b is a dense array: pass --dense"),
    ):
        with pytest.raises(MatrixError, match=what):
            import_matrix(f"{path}::{inner}", tmp_path / "none.zarr")
    shutil.copy(path, tmp_path / "a.h5")
    assert_same(read(tmp_path / "a.h5", tmp_path)[0], A)


@pytest.mark.parametrize("dtype", ["f8", "c16", "?", "empty"])
def test_sparse_73(tmp_path, dtype):
    matrix = sp.csc_matrix((30, 20)) if dtype == "empty" else A.astype(dtype)
    write_73(tmp_path / "a.mat", lambda file: put_sparse(file, "a", matrix, "logical" if dtype == "?" else "double"))
    found, said = read(tmp_path / "a.mat", tmp_path)
    assert_same(found, matrix)
    assert said == "read as a MATLAB file; a; no names"


@pytest.mark.parametrize("options", [{}, {"chunks": (7, 4), "compression": "gzip"}])
@pytest.mark.parametrize("kind", ["double", "single", "int16", "logical", "complex"])
def test_dense_73(tmp_path, options, kind):
    dtypes = {"double": "f8", "single": "f4", "int16": "i2", "logical": "u1", "complex": "c16"}
    values = (10 * A.toarray()).astype(dtypes[kind])
    values = (values != 0).astype("u1") if kind == "logical" else values
    written = values.view([("real", "f8"), ("imag", "f8")]) if kind == "complex" else values
    write_73(
        tmp_path / "a.mat",
        lambda file: put_dense(file, "a", written, "double" if kind == "complex" else kind, **options),
    )
    found, said = read(tmp_path / "a.mat", tmp_path, dense=True)
    assert_same(found, sp.csr_array(values.astype(bool) if kind == "logical" else values))
    assert said == "read as a MATLAB file; a; no names; left out: zeros of a dense array"


def test_odd_files_73(tmp_path):
    path = tmp_path / "a.mat"

    def empty(file):
        made = file.create_dataset("a", data=np.array([0, 5], "u8"))
        made.attrs["MATLAB_empty"] = np.uint8(1)
        matlab_class(made, "double")

    write_73(path, empty)
    found, _ = read(path, tmp_path, dense=True)
    assert found.shape == (0, 5)

    def several(file):
        for name in "ab":
            put_sparse(file, name, A)

    write_73(path, several)
    with pytest.raises(MatrixError, match="several sparse matrices: a, b; name one"):
        import_matrix(path, tmp_path / "none.zarr")

    def cells(file):
        matlab_class(file.create_dataset("c", (1, 1), h5py.ref_dtype), "cell")

    write_73(path, cells)
    with pytest.raises(MatrixError, match=r"there is c \(cell\)"):
        import_matrix(path, tmp_path / "none.zarr")


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["5", "7.3"])
def test_damaged(tmp_path, version):
    """A file without its end is refused in one line, wherever the end is."""
    path = tmp_path / "a.mat"
    if version == "5":
        scipy.io.savemat(path, {"a": A}, do_compression=True)
    else:
        write_73(path, lambda file: put_sparse(file, "a", A))
    raw = path.read_bytes()
    for keep in (0, 1, 60, 130, 600, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:keep])
        with pytest.raises(MatrixError, match=r"a\.mat") as caught:
            import_matrix(path, tmp_path / "a.zarr")
        assert str(caught.value).isprintable()
    assert [each.name for each in tmp_path.iterdir()] == ["a.mat"]


@pytest.mark.parametrize("text", ["1 2 3\n4 5 6\n", "# Created by Octave\n# name: A\n# type: sparse matrix\n"])
def test_text_is_told_from_damage(tmp_path, text):
    (tmp_path / "a.mat").write_text(text)
    with pytest.raises(MatrixError, match="it is text, and no MATLAB file; save it again with save -v7"):
        import_matrix(tmp_path / "a.mat", tmp_path / "out.zarr")


def test_orient_means_nothing(tmp_path):
    scipy.io.savemat(tmp_path / "a.mat", {"a": A})
    with pytest.raises(
        InputError, match=r"orient='genes-by-cells': .* is a MATLAB file and has no choice of orientation"
    ):
        import_matrix(tmp_path / "a.mat", tmp_path / "a.zarr", orient="genes-by-cells")


def test_no_h5py_is_needed_before_73(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    scipy.io.savemat(tmp_path / "a.mat", {"a": A})
    assert_same(read(tmp_path / "a.mat", tmp_path)[0], A)
    shutil.copy(DATA / "testhdf5_7.4_GLNX86.mat", tmp_path / "b.mat")
    with pytest.raises(InputError, match=r"reading HDF5 needs h5py: .*extra h5ad"):
        import_matrix(tmp_path / "b.mat", tmp_path / "b.zarr")


def test_what_was_read_is_logged(tmp_path, caplog):
    scipy.io.savemat(tmp_path / "a.mat", {"a": A})
    with caplog.at_level(logging.WARNING, "spdist"):
        import_matrix(tmp_path / "a.mat", tmp_path / "a.zarr")
    assert "a.mat: 30 x 20 with 120 entries, read as a MATLAB file; a; no names" in caplog.text
