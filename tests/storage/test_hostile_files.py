"""Files that lie, made to hang a reader, to fill memory or disk, or to read other files: one line, and nothing is left.

`tests.fuzz` makes many more, at random.
"""

import bz2
import gzip
import io
import os
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError
from spdist.matrices.csr import CSR, from_scipy
from spdist.storage.formats import compressed_rows, matrix_market, npz, source
from spdist.storage.formats.hdf5 import reader
from spdist.storage.import_export import import_matrix
from tests.fuzz.seeds import cells, seeds
from tests.support.pieces import take_pieces

TOP = "%%MatrixMarket matrix coordinate real general\n"


def refused(tmp_path: Path, name: str, raw: bytes, what: str) -> None:
    """Import a file that must be refused: in one line that names it, leaving nothing."""
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(MatrixError, match=what) as caught:
        import_matrix(tmp_path / name, tmp_path / "out.zarr")
    said = str(caught.value)
    assert name in said
    assert said.isprintable()
    assert len(said) < 1000
    assert sorted(each.name for each in tmp_path.iterdir()) == [name]


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (TOP + "1000000000000 3 1\n1 1 1\n", r"1,000,000,000,000 rows in a file of 70 B .*over the limit of 2.00 GiB"),
        (TOP + f"2 {1 << 63} 1\n1 1 1\n", "64-bit"),
        (TOP + "3 3 1000000\n1 1 1\n", "1,000,000 entries do not fit into a file of 64 bytes"),
        (
            TOP.replace("coordinate", "array").replace("general", "symmetric") + "90000000 90000000\n1\n",
            "do not fit",
        ),
        (TOP.replace("real", "\x1b[2J\x85") + "1 1 1\n", r"'\\x1b\[2j' is none|first line is like"),
        (TOP + "1 1 1\n1 1 \x1b]0;x\x07 5\n", r"line 3: expected 3 numbers, got '1 1 \\x1b"),
        (TOP.replace("real", "x" * 1_000_000) + "1 1 1\n", "line 1: 'xxx"),
    ],
)
def test_text_that_lies(tmp_path, text, what):
    refused(tmp_path, "a.mtx", text.encode("latin-1"), what)


@pytest.mark.parametrize(("pack", "ending"), [(gzip.compress, "gz"), (bz2.compress, "bz2")])
@pytest.mark.parametrize("filling", [b"\n", b"%\n", b"1", b"1 1 1\n"])
def test_text_that_inflates(tmp_path, monkeypatch, pack, ending, filling):
    """Blank lines, comments, one endless line, more entries than announced."""
    monkeypatch.setattr(source, "INFLATED_BYTES", 1 << 20)
    monkeypatch.setattr(source, "INFLATED_RATIO", 2)
    monkeypatch.setattr(matrix_market.read_entries, "__defaults__", (1 << 14,))
    raw = pack(TOP.encode() + b"3 3 9\n" + b"1 1 1\n" * 9 + filling * (2 << 20))
    refused(tmp_path, f"a.mtx.{ending}", raw, "that inflate to|a line is longer than|more than the 9 entries")


@pytest.mark.parametrize("where", ["before", "after"])
def test_text_of_comments(tmp_path, monkeypatch, where):
    monkeypatch.setattr(matrix_market, "MAX_IDLE_LINES", 100)
    idle = "%\n\n" * 60
    text = TOP + idle + "1 1 1\n1 1 1\n" if where == "before" else TOP + "1 1 1\n1 1 1\n" + idle
    refused(tmp_path, "a.mtx", text.encode(), "more than 100 comments and blank lines")


# -- npz ---------------------------------------------------------------------------------------------------------------


def npy(description: str = "'<f8'", shape: str = "(2,)", body: bytes = b"", version: int = 1) -> bytes:
    """Return a .npy array with any header."""
    header = f"{{'descr': {description}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header + body


def array(values, dtype=None) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(values, dtype))
    return file.getvalue()


def archive(method: int = zipfile.ZIP_STORED, **changes: bytes | None) -> bytes:
    """Return what save_npz writes of the 2 x 2 identity, with some arrays changed or left out."""
    whole = {"format": array(b"csr"), "shape": array([2, 2]), "indptr": array([0, 1, 2]), "indices": array([0, 1])}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as out:
        for name, raw in ({**whole, "data": array([1.0, 1.0])} | changes).items():
            if raw is not None:
                out.writestr(f"{name}.npy", raw)
    return file.getvalue()


ARCHIVES = [
    ("format", array(np.array([], "S3")), "'format' holds .* must hold a word"),
    ("format", array(["csr", "csc"]), "'format' holds"),
    ("format", npy("'|S200000000'", "()"), "'format' holds"),
    ("format", npy("'<U1'", "()", b"\xff" * 4), "'format' is damaged"),
    ("format", array(b"\x1b\n"), r"format '\\x1b\\n' is not read"),
    ("shape", array([2.0, np.nan]), "'shape' holds float64; it must hold whole numbers"),
    ("shape", array([2, 2j]), "'shape' holds complex128"),
    ("shape", array([-2, 2]), r"this has shape \(-2, 2\)"),
    ("shape", array(2), "'shape' has shape .* must have 1 dimension"),
    ("shape", npy("'<i8'", "(10000000000,)"), "'shape' has 10,000,000,000 elements; at most 16|inflate"),
    ("shape", array([1 << 63, 2], "u8"), "64-bit"),
    ("shape", array([1 << 40, 2]), "rows in a file of"),
    ("indices", array([0.0, 1.0]), "'indices' holds float64"),
    ("indices", array(1), "must have 1 dimension"),
    ("indices", array([0, 1 << 63], "u8"), "column 9,223,372,036,854,775,808 in row 1 is outside"),
    ("indptr", array([0, (1 << 63) - 1, -(1 << 63)]), "does not rise"),
    ("data", array([["a", "b"]]), "'data' holds <U1"),
    ("data", npy("'|O'"), "Python objects"),
    ("data", npy("[('block', '<f8')]"), "'data' holds .*block.*; it must hold numbers"),
    ("data", npy("('<f8', (2, 2))"), "'data' "),
    ("data", npy("'<f8'", "(-2,)"), "cannot have shape"),
    ("data", npy("'<f8'", "(4611686018427387904, 9)"), "cannot have shape"),
    ("data", npy("'<f8'", "(2000000000,)"), "inflate to"),
    ("data", npy("'<f8'", "(2,)", version=7), "version"),
    ("data", b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 1000, "a header of 4.00 GiB"),
    ("data", npy("'<f8'", "(" * 3000), "'data' is damaged"),
    ("data", npy("'<f8'", "(2,)", b"\0" * 9), "'data' is truncated"),
    ("data", b"", "'data' is damaged"),
    ("data", None, "no array 'data'"),
]


@pytest.mark.parametrize(("name", "raw", "what"), ARCHIVES)
def test_archives_that_lie(tmp_path, name, raw, what):
    refused(tmp_path, "a.npz", archive(**{name: raw}), what)


def test_other_archives(tmp_path, monkeypatch):
    whole = archive()
    refused(tmp_path, "a.npz", archive(zipfile.ZIP_LZMA), "compressed by method 14")
    locked = whole.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01")
    locked = locked.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
    refused(tmp_path, "a.npz", locked, "encrypted")
    (tmp_path / "a.npz").write_bytes(whole)
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.npz", "a") as out:
        warnings.simplefilter("ignore")
        out.writestr("data.npy", array([2.0, 2.0]))
    refused(tmp_path, "a.npz", (tmp_path / "a.npz").read_bytes(), "'data.npy' is there twice")
    monkeypatch.setattr(npz, "MOST_BYTES", 1000)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for number in range(100):
            out.writestr(f"{number}.npy", b"")
    refused(tmp_path, "a.npz", file.getvalue(), "list of arrays is too long")


def test_a_row_of_duplicates_takes_little_memory(tmp_path, monkeypatch):
    """Nine pieces of one row are folded as they come, in the order of the file."""
    take_pieces(monkeypatch, 64)
    rng = np.random.default_rng(0)
    columns, values = rng.integers(0, 5, 600), rng.standard_normal(600)
    messy = sp.csr_matrix((values, columns, [0, 3, 590, 590, 600]), shape=(4, 5))
    for kind in (messy, messy.T):
        sp.save_npz(tmp_path / "a.npz", kind)
        got = import_matrix(tmp_path / "a.npz", tmp_path / "out.zarr", overwrite=True)
        want = sp.csr_matrix(kind, copy=True)
        want.sum_duplicates()
        np.testing.assert_array_equal(got.rows(0, got.nrows).indices, from_scipy(want).indices)
        np.testing.assert_allclose(got.rows(0, got.nrows).data, from_scipy(want).data)
    longest = []
    joined = compressed_rows._joined

    def note(parts: list[CSR]) -> CSR:
        longest.append(sum(part.nnz for part in parts))
        return joined(parts)

    monkeypatch.setattr(compressed_rows, "_joined", note)
    sp.save_npz(tmp_path / "a.npz", messy)
    import_matrix(tmp_path / "a.npz", tmp_path / "out.zarr", overwrite=True)
    assert max(longest) <= 5 * 64


# -- h5ad --------------------------------------------------------------------------------------------------------------


def h5(tmp_path: Path, change) -> bytes:
    """Return an .h5ad file of a small matrix after a change to its group X."""
    path = tmp_path / "made.h5ad"
    path.write_bytes(cells()["csr.h5ad"])
    with h5py.File(path, "r+") as file:
        change(file["X"])
    raw = path.read_bytes()
    path.unlink()
    return raw


def put(name, **options):
    """Return a change that replaces a dataset."""

    def change(group):
        del group[name]
        group.create_dataset(name, **options)

    return change


def link(name, target):
    """Return a change that replaces a dataset, or the group if `name` is "X", by a link."""

    def change(group):
        place = group.parent if name == "X" else group
        if name == "X":
            place.move("X", "there")
        else:
            del place[name]
        place[name] = target

    return change


def attribute(name, value):
    return lambda group: group.attrs.__setitem__(name, value)


def virtual(group):
    layout = h5py.VirtualLayout((24,), "f8")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (24,))
    del group["data"]
    group.create_virtual_dataset("data", layout)


CHANGES = [
    (put("indptr", shape=((1 << 33) + 1,), dtype="i8", chunks=(1024,)), "inflate to 64.00 GiB"),
    (attribute("shape", [1 << 40, 10]), "rows in a file of"),
    (attribute("shape", [12.0, 10.0]), "two dimensions"),
    (attribute("shape", [12, 10, 1]), "two dimensions"),
    (attribute("shape", np.zeros(5000)), "too long"),
    (attribute("encoding-type", 5), "not sparse"),
    (attribute("encoding-type", np.bytes_(b"\xff\n")), "not sparse"),
    (lambda group: group.attrs.__delitem__("shape"), "two dimensions"),
    (lambda group: group.__delitem__("data"), "no array 'data'"),
    (put("data", data=np.ones((6, 4))), "no array 'data' of one dimension"),
    (put("data", data=3.0), "no array 'data' of one dimension"),
    (put("data", data=h5py.Empty("f8")), "no array 'data' of one dimension"),
    (put("data", data=["a"] * 24), "Python objects"),
    (put("data", data=np.zeros(24, [("a", "f8")])), "'data' holds"),
    (put("data", data=np.zeros(24, "f2")), "float16"),
    (put("indices", data=np.zeros(24)), "'indices' holds float64"),
    (put("data", shape=(24,), dtype="f8", maxshape=(None,), chunks=(1 << 28,)), "HDF5 chunks of 268,435,456"),
    (put("data", shape=(24,), dtype="f8", external=[("/etc/passwd", 0, 192)]), "lies in other files"),
    (virtual, "lies in other files"),
    (link("data", h5py.ExternalLink("/etc/hostname", "/x")), "is a link"),
    (link("data", h5py.SoftLink("/X/data")), "is a link"),
    (link("X", h5py.ExternalLink("other.h5ad", "/X")), "is a link"),
    (link("X", h5py.SoftLink("/there")), "is a link"),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_cells_that_lie(tmp_path, number):
    change, what = CHANGES[number]
    refused(tmp_path, "a.h5ad", h5(tmp_path, change), what)


@pytest.mark.parametrize(
    ("how", "what"), [("crash", "crashed, SIGSEGV"), ("loop", "took too long"), ("wait", "within 1 s")]
)
def test_a_reader_that_does_not_answer(tmp_path, monkeypatch, how, what):
    """As damaged files make the HDF5 library do: it crashes, computes without end, or waits."""
    acts = {"crash": "os.kill(os.getpid(), 11)", "loop": "while True: pass", "wait": "time.sleep(60)"}
    fake = tmp_path / "fake"
    fake.mkdir()
    start = "import os, signal, time\nsignal.setitimer(signal.ITIMER_PROF, 0.2)\n"
    (fake / "fake_process.py").write_text(start + acts[how] + "\n")
    monkeypatch.setenv("PYTHONPATH", str(fake))
    monkeypatch.setattr(reader, "PROCESS", "fake_process")
    monkeypatch.setattr(reader, "PATIENCE", 1.0 if how == "wait" else 60.0)
    place = tmp_path / "files"
    place.mkdir()
    refused(place, "a.h5ad", cells()["csr.h5ad"], what)


def test_cells_elsewhere(tmp_path):
    import fsspec

    with fsspec.open("memory://hostile-test/a.h5ad", "wb") as file:
        file.write(cells()["csc.h5ad"])
    got = import_matrix("memory://hostile-test/a.h5ad::X", tmp_path / "out.zarr")
    assert got.shape == (12, 10)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.zarr"]


# -- any file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["real.mtx", "packed.mtx.gz", "packed.mtx.bz2", "csr-packed.npz", "coo.npz"])
def test_cut_at_every_byte(tmp_path, name):
    """A file without its end is refused, wherever the end is, unless text ends in the middle of its last number."""
    raw = seeds()[name]
    for keep in range(0, len(raw) - 1, 1 if len(raw) < 300 else 11):
        (tmp_path / name).write_bytes(raw[:keep])
        try:
            import_matrix(tmp_path / name, tmp_path / "out.zarr")
        except MatrixError as error:
            said = str(error)
        else:
            assert name == "real.mtx"
            assert raw[keep:].count(b"\n") == 1
            said = name
            shutil.rmtree(tmp_path / "out.zarr")
        assert name in said
        assert said.isprintable()


@pytest.mark.parametrize("name", ["a.mtx", "a.npz", "a.h5ad"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing", "circle"])
def test_sources_that_are_no_files(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("device", "circle"):
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(InputError, match=r"no ordinary file|no such file|cannot be a path|cannot tell"):
        import_matrix(path, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize("name", ["x" * 5000 + ".mtx", "a\0b.mtx", "a\nb.mtx", "a/" * 3000 + "b.mtx"])
def test_names_that_cannot_be(tmp_path, name):
    (tmp_path / "a.mtx").write_text(TOP + "1 1 1\n1 1 1\n")
    odd = f"{tmp_path}/{name}"
    pairs = [(odd, tmp_path / "out.zarr"), (tmp_path / "a.mtx", odd)]
    for file, target in pairs[: 1 if "\n" in name else 2]:  # a name with a line break can be
        with pytest.raises(InputError, match=r"cannot be a path|no such file"):
            import_matrix(file, target)


MEASURE = """
import sys
from pathlib import Path
from spdist.errors import MatrixError
from spdist.storage.import_export import import_matrix
try:
    import_matrix(sys.argv[1], sys.argv[2])
except MatrixError as error:
    print(error)
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) >> 10)  # getrusage counts the process that forked this one too
"""


@pytest.mark.parametrize("name", ["lines.mtx.bz2", "data.npz"])
def test_bombs_take_little_memory(tmp_path, name):
    """Two gigabytes of one line in a kilobyte; a gigabyte of zeros, of which one row is made."""
    sp.save_npz(tmp_path / "small.npz", sp.random_array((30, 30), density=0.2, format="csr", rng=1))
    (tmp_path / "small.mtx").write_bytes(TOP.encode() + b"3 3 1\n1 1 1\n")
    for small in ("small.npz", "small.mtx"):  # kernels that are compiled first would take memory too
        import_matrix(tmp_path / small, tmp_path / f"{small}.zarr")
    if name == "data.npz":
        n = 60_000_000
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
            out.writestr("format.npy", array(b"csr"))
            out.writestr("shape.npy", array([1, 4]))
            out.writestr("indptr.npy", array([0, n]))
            for member, description, width in (("indices", "'<i4'", 4), ("data", "'<f8'", 8)):
                with out.open(f"{member}.npy", "w") as file:
                    file.write(npy(description, f"({n},)"))
                    for _ in range(n * width // 24_000_000):
                        file.write(bytes(24_000_000))
    else:
        packer = bz2.BZ2Compressor()
        with (tmp_path / name).open("wb") as file:
            file.write(packer.compress(TOP.encode() + b"3 3 9\n"))
            for _ in range(20):
                file.write(packer.compress(b"1" * (10 << 20)))
            file.write(packer.flush())
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / name), str(tmp_path / "out.zarr")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert int(run.stdout.splitlines()[-1]) < 600
