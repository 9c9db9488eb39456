"""Arguments and job files that cannot be: exit code 2, one line on stderr, nothing written."""

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import load_workflow
from tests.fuzz.cases import Case
from tests.fuzz.seeds import store_matrices
from tests.fuzz.test_fuzz import run

pytestmark = pytest.mark.filterwarnings("ignore")  # on stderr they would show, and are looked for there
LONG = "x" * 5000
PLAN = ("plan", "A.zarr", "B.zarr")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return a folder of stored matrices and of things that are none."""
    folder = tmp_path_factory.mktemp("places")
    store_matrices(folder)
    (folder / "a.mtx").write_text("%%MatrixMarket matrix coordinate real general\n1 1 1\n1 1 1\n")
    (folder / "file").write_text("mine")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "circle").symlink_to(folder / "circle")
    return folder


REFUSED = [
    *[(*PLAN, f"--memory-limit={v}") for v in ("1e400", "-5", "12 parsecs", "9" * 400, "0", "0.0000001", "", "1\n2")],
    *[(*PLAN, f"--host-limit={v}") for v in ("1e400", "-5", "9" * 400)],
    *[(*PLAN, f"--grid={v}") for v in ("0,0,0", "-1,1,1", "1,1", "²,1,1", "9" * 20 + ",1,1", "9" * 5000, ",,")],
    *[(*PLAN, f"--top-n={v}") for v in ("0", "-1", "9" * 30, "9" * 5000, "x\ny", "²")],
    *[(*PLAN, f"--threshold={v}") for v in ("nan", "x")],
    *[(*PLAN, f"--mask={v}") for v in (LONG, "file", "pipe", "circle", "empty", "/", "foo://x", "github://x", "://")],
    *[(*PLAN, f"--scale-rows={v}") for v in (LONG, "file", "pipe", "/dev/zero", "circle", "empty", "a\nb")],
    *[(*PLAN, option, LONG) for option in ("--semiring", "--engine", "--normalize", "--triangle")],
    *[("info", v) for v in ("/", "file", "pipe", "circle", LONG, "/dev/zero", "a\nb", "reference://x", "\udcff")],
    *[("transpose", "A.zarr", v) for v in ("/", LONG, "file", "pipe", "/dev/null", "A.zarr", "circle", "\udcff")],
    *[("transpose", "A.zarr", v, "--overwrite") for v in ("/", "file", "pipe", "empty", ".")],
    *[("export", "A.zarr", v) for v in ("/", LONG + ".mtx", "/dev/null", "A.zarr", "x", "file/x.npz", "/proc/x.mtx")],
    *[("export", "A.zarr", v, "--overwrite", "--format", "mtx") for v in ("pipe", "empty", "A.zarr", "/dev/full")],
    *[("import", "a.mtx", v) for v in ("/", LONG, "file", "pipe", "A.zarr", "a.mtx/x", "circle", "/proc/x")],
    *[("import", v, "out.zarr") for v in ("/", "pipe", LONG + ".mtx", "foo://x.mtx", "a.h5ad::\n", "\udcff.mtx")],
    *[("import", "a.mtx", "out.zarr", f"--block-size={v}") for v in ("0x3", "9" * 5000 + "x1", "²x²", "3x3")],
    *[("reduce", "histogram", "A.zarr", "B.zarr", f"--bins={v}") for v in ("", "x", "0", "1,0", "nan,1", "0,inf")],
    *[("reduce", "row_sums", "A.zarr", "B.zarr", "--out", v) for v in ("/", LONG, "empty", "pipe")],
    *[("multiply", "A.zarr", "B.zarr", v) for v in ("/", "A.zarr", "A.zarr/x", "file", "pipe", "/dev/null", LONG)],
    *[("multiply", "A.zarr", "B.zarr", v) for v in ("", "ftp://127.0.0.1:1/x", "http://127.0.0.1:1/x", "zip://x", "y://")],
    *[("transpose", "A.zarr", v, "--overwrite") for v in ("", "ftp://127.0.0.1:1/x", "local://file")],
    *[("multiply", "A.zarr", "B.zarr", "out.zarr", f"--workers={v}") for v in ("0", "-1", "9" * 30, "100000000")],
    *[("generate", "banded", "out.zarr", "--dtype", v) for v in ("x", "O", "U5", "i4,i4", LONG)],
    ("x\ny",), ("--nope\n",), ("info",), ("info", "A.zarr", "--x\ny"),
]  # fmt: skip


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words)[:60])
def test_arguments_that_cannot_be(places, monkeypatch, words):
    outcome = run(Case("arguments", words, ()), places, monkeypatch)
    assert (outcome.code, outcome.wrong) == (2, ""), outcome
    assert len(outcome.said) < 2200
    assert (places / "file").read_text() == "mine"


class Evil:
    """Leaves a file where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("what", ["pickle", "objects", "table", "cut", "claim", "words", "archive"])
def test_factors_that_cannot_be(places, monkeypatch, what):
    folder = places / "factors"
    folder.mkdir()
    try:
        for name in ("A.zarr", "B.zarr"):
            (folder / name).symlink_to(places / name)
        values = {
            "pickle": np.array([Evil()], object), "objects": np.array([None, "x"], object), "table": np.ones((3, 4)),
            "words": np.array(["a"]),
        }.get(what, np.ones(12))  # fmt: skip
        np.save(folder / "f.npy", values, allow_pickle=True)
        raw = (folder / "f.npy").read_bytes()
        if what == "archive":
            np.savez(folder / "f.npz", values)
            raw = (folder / "f.npz").read_bytes()
        raw = {"cut": raw[:-1], "claim": raw.replace(b"(12,), }   ", b"(%d,), }" % 10**10)}.get(what, raw)
        (folder / "f.npy").write_bytes(raw)
        outcome = run(Case("npy", (*PLAN, "--scale-rows", "f.npy"), ()), folder, monkeypatch)
        assert (outcome.code, outcome.wrong) == (2, ""), outcome
        assert "f.npy" in outcome.said
        assert not (folder / "ran").exists()
    finally:
        shutil.rmtree(folder)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (BOMB, "an alias"),
        ("[" * 5000, "is not YAML"),
        ("a: !!python/object/apply:os.mkdir [ran]\n", "is not YAML"),
        ("a: \x00\n", "is not YAML"),
        ("a: A.zarr\nb: B.zarr\nout: 'x\\ny'\nnope: 1\n", "unknown key 'nope'"),
        ("a: A.zarr\nb: B.zarr\nout: C2.zarr\nworkers: [1, 2]\n", r"workers: \[1, 2\]"),
        ("a: A.zarr\nb: B.zarr\nout: C2.zarr\nmemory_limit: 12 parsecs\n", "memory_limit"),
        ("a: A.zarr\nb: B.zarr\nout: C2.zarr\ngrid: [0, 0, 0]\n", "grid"),
        (f"a: {LONG}\nb: B.zarr\nout: C2.zarr\n", "a: 'xxx"),
        ('a: A.zarr\nb: B.zarr\nout: "C\\0.zarr"\n', "out"),
        ("1: 2\n? [a]\n: 3\n", "is not YAML"),
        ("a: 1" + "0" * 5000 + "\n", "is not YAML"),
        ("x: y\n" * 20_000, "more than 65,536 characters"),
    ],
)
def test_job_files_that_cannot_be(places, monkeypatch, capsys, text, what):
    monkeypatch.chdir(places)
    workflow = load_workflow("multiply")
    monkeypatch.setattr(sys.modules["job"], "catch_signals", lambda: None)
    Path("job.yaml").write_text(text)
    assert workflow.main(["job.yaml"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert len(said) < 1500
    assert re.search(what, said), said
    assert not Path("ran").exists()


def test_a_job_file_that_is_a_pipe(places, monkeypatch, capsys):
    monkeypatch.chdir(places)
    workflow = load_workflow("multiply")
    monkeypatch.setattr(sys.modules["job"], "catch_signals", lambda: None)
    assert workflow.main(["pipe"]) == 2
    assert "no ordinary file" in capsys.readouterr().err
