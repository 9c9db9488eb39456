"""Standard input and standard output as places of files: real processes, joined by pipes."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist import cli
from tests.test_cli import SPDIST

EDGES = "".join(f"{u}\t{v}\t{w}\n" for u, v, w in [("a", "b", 1), ("b", "c", 2), ("c", "a", 3), ("x", "y", 1)])
CLUSTERS = "a\tb\tc\nx\ty\n"


def piped(*words: str | Path, given: str | bytes = b"") -> subprocess.CompletedProcess[bytes]:
    content = given.encode() if isinstance(given, str) else given
    return subprocess.run([*SPDIST, *map(str, words)], input=content, capture_output=True, timeout=200)


@pytest.mark.parametrize("words", [["--abc"], ["--format", "tsv"]])
def test_clusters_go_from_pipe_to_pipe(words):
    done = piped("markov-clustering", "-", *words, "-o", "-", given=EDGES)
    assert (done.returncode, done.stdout.decode()) == (0, CLUSTERS)
    said = done.stderr.decode().splitlines()
    assert all(line.startswith("spdist: ") for line in said)
    assert said[0].startswith("spdist: standard input: 5 x 5 with 4 entries")
    assert "2 clusters" in said[-1]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_standard_output_loses_only_what_was_to_be_printed(tmp_path, options, unbuffered):
    a = str(spdist.save(tmp_path / "A.zarr", sp.eye_array(9, format="csr")).url)
    words = [*SPDIST, "multiply", a, a, str(tmp_path / "C.zarr"), "--engine", "scipy", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, env=environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"spdist: standard output cannot be written (No space left on device); {tmp_path}/C.zarr is whole, and only "
        f"what was to be printed is lost"
    )
    assert spdist.check(tmp_path / "C.zarr").ok


def test_help_on_a_full_standard_output_is_a_line():
    with Path("/dev/full").open("wb") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # argparse drops errors of what it writes at once
        words = [*SPDIST, "--help"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, env=environment)
    assert (done.returncode, done.stderr) == (
        1, "spdist: standard output cannot be written (No space left on device)\n",
    )  # fmt: skip


def test_names_that_are_not_utf8_come_out_as_they_went_in():
    done = piped("markov-clustering", "-", "--abc", "-o", "-", given=b"caf\xe9\tb\t1\n")
    assert (done.returncode, done.stdout) == (0, b"caf\xe9\tb\n")


def test_matrices_go_from_pipe_to_pipe(tmp_path):
    (tmp_path / "g.abc").write_text(EDGES)
    spdist.import_matrix(tmp_path / "g.abc", tmp_path / "G.zarr", names=True)
    export = subprocess.Popen(
        [*SPDIST, "export", str(tmp_path / "G.zarr"), "-", "--format", "abc"], stdout=subprocess.PIPE
    )
    words = [*SPDIST, "import", "-", str(tmp_path / "H.zarr"), "--format", "abc", "--names", "--json"]
    assert subprocess.run(words, stdin=export.stdout, capture_output=True, timeout=200).returncode == 0
    export.stdout.close()
    assert export.wait() == 0
    g, h = spdist.open(tmp_path / "G.zarr"), spdist.open(tmp_path / "H.zarr")
    assert (g.to_scipy() != h.to_scipy()).nnz == 0
    assert g.row_names.tolist() == h.row_names.tolist() == h.column_names.tolist()


@pytest.mark.parametrize("kind", ["mtx", "mtx.gz", "npz"])
def test_exports_to_standard_output_are_those_to_files(tmp_path, kind):
    m = sp.random_array((30, 20), density=0.2, rng=np.random.default_rng(2), format="csr")
    spdist.save(tmp_path / "A.zarr", m)
    done = piped("export", tmp_path / "A.zarr", "-", "--format", kind)
    assert (done.returncode, done.stderr) == (0, b"")
    (tmp_path / f"out.{kind}").write_bytes(done.stdout)
    back = spdist.import_matrix(tmp_path / f"out.{kind}", tmp_path / "B.zarr")
    assert (back.to_scipy() != m).nnz == 0


def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path):
    n = 60_000  # more text than a pipe holds
    spdist.save(tmp_path / "A.zarr", sp.eye_array(n).tocsr())
    export, pipe = ["export", "A.zarr", "-", "--format", "abc"], subprocess.PIPE
    for words, unbuffered in ((export, ""), (export, "1"), (["info", "A.zarr"], "")):
        where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONUNBUFFERED": unbuffered}}
        process = subprocess.Popen([*SPDIST, *words], stdout=pipe, stderr=pipe, bufsize=0, **where)
        if words is export:
            assert process.stdout.read(4) == b"0\t0\t"
        process.stdout.close()
        assert (process.wait(timeout=100), process.stderr.read()) == (1, b"")
        process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path):
    spdist.save(tmp_path / "A.zarr", sp.eye_array(3))
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        words = [*SPDIST, "export", str(tmp_path / "A.zarr"), "-", "--format", "mtx"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=100)
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_terminal_is_told_what_is_awaited(tmp_path):
    ours, theirs = pty.openpty()
    try:
        words = [*SPDIST, "import", "-", str(tmp_path / "G.zarr"), "--format", "abc", "--names", "--json"]
        process = subprocess.Popen(words, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert b"type the file, then Ctrl-D" in process.stderr.readline()
        os.write(ours, b"a b 1\n\x04")
        assert process.wait(timeout=100) == 0
        process.stderr.close()
    finally:
        os.close(ours)
        os.close(theirs)
    assert spdist.open(tmp_path / "G.zarr").row_names.tolist() == ["a", "b"]


def test_standard_input_that_is_closed_is_empty(tmp_path):
    code = "import os, sys\nos.close(0)\nos.execv(sys.executable, [sys.executable, '-m', 'spdist', *sys.argv[1:]])"
    words = ["triangles", "-", "--format", "abc"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "standard input is empty (0 x 0)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["markov-clustering", "-", "--abc", "-o", "-", "--json"], "-o - and --json both write to standard output"),
        (["markov-clustering", "-", "--abc", "-o", "-", "--resume"], "so nothing can be resumed"),
        (["markov-clustering", "-", "-o", "-"], "standard input has no name that says what it is: pass --format"),
        (["import", "A.zarr", "-"], "- stands for standard input or output, which cannot be used here"),
        (["import", "-", "B.zarr", "--format", "zarr"], "Zarr is a folder, which standard input cannot be"),
        (["multiply", "A.zarr", "A.zarr", "-", "--transpose-b"], "- stands for standard input or output"),
        (["pagerank", "A.zarr", "-"], "- stands for standard input or output"),
        (["transpose", "-", "B.zarr"], "- stands for standard input or output"),
        (["export", "A.zarr", "-"], "standard output has no name that says what to write: pass --format"),
        (["export", "A.zarr", "-", "--format", "mtx", "--json"], "TARGET - and --json both write"),
        (["export", "A.zarr", "-", "--format", "binsparse"], "binsparse is a folder"),
        (["export", "A.zarr", "-", "--format", "npz.gz"], "npz is not written compressed"),
        (["export", "A.zarr", "-", "--format", "abc"], "A.zarr is 2 x 3: rows and columns of a list of edges"),
    ],
)
def test_what_cannot_go_through_pipes(tmp_path, monkeypatch, capsysbinary, words, says):
    monkeypatch.chdir(tmp_path)
    spdist.save("A.zarr", sp.csr_array((2, 3)))
    assert cli.main(words) == 2
    out, err = capsysbinary.readouterr()
    assert says in err.decode()
    assert b"--json" in " ".join(words).encode() or out == b""
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]


def test_an_error_in_standard_input_names_it_and_the_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a b 1\na b c d\n")))
    with pytest.raises(spdist.MatrixError, match=r"^standard input, line 2"):
        spdist.similarity("-", "S.zarr", format="abc")
    assert not list(tmp_path.iterdir())
