"""The command line as a user meets it: real processes, exit codes, one line for what is wrong, kills and resumes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import scipy.sparse as sp

from spdist import cli
from spdist.api import products as api
from spdist.cli import entry
from spdist.storage import groups
from spdist.storage.matrix import open_matrix
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import files, read
from tests.support.worker_processes import workers_below

SPDIST = [sys.executable, "-m", "spdist"]


def spdist(*words: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SPDIST, *map(str, words)], capture_output=True, text=True, timeout=200, **options)


def refused(*words: str | Path, code: int = 2) -> str:
    """Run a command that must fail; return its one line on stderr."""
    done = spdist(*words)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_help_is_quick_and_lists_every_command():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = spdist("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert after.ru_utime - before.ru_utime < 0.8  # seconds of processor time; 0.1: no numpy, zarr or dask is loaded
    for command in ("import", "export", "info", "generate", "plan", "multiply", "verify"):
        assert f"    {command} " in done.stdout


def test_every_operand_and_option_has_help():
    commands = entry._parser("generate")._subparsers._group_actions[0].choices
    assert len(commands) > 15
    assert not {(name, action.dest) for name, sub in commands.items() for action in sub._actions if not action.help}


def test_import_says_what_of_an_h5ad_is_read(capsys):
    with pytest.raises(SystemExit):
        cli.main(["import", "--help"])
    assert "of an .h5ad X is read, or the path after ::, as in cells.h5ad::layers/counts" in words_of(capsys)


def words_of(capsys) -> str:
    """Return what was printed, however it was cut into lines."""
    return " ".join(capsys.readouterr().out.split())


def test_help_loads_nothing_heavy():
    code = "import sys, spdist.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'numpy', 'zarr', 'dask', 'numba', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_whole_tour(tmp_path):
    m = random_matrix(300, 300, 6, 1)
    sp.save_npz(tmp_path / "a.npz", m)
    assert spdist("import", tmp_path / "a.npz", tmp_path / "A.zarr").returncode == 0
    facts = json.loads(spdist("info", tmp_path / "A.zarr", "--json").stdout)
    assert (facts["shape"], facts["nnz"], facts["dtype"], facts["state"]) == ([300, 300], m.nnz, "float64", "complete")
    plan = json.loads(spdist("plan", tmp_path / "A.zarr", tmp_path / "A.zarr", "--grid", "3,2,1", "--json").stdout)
    assert plan["grid"] == {"row_blocks": 3, "inner_blocks": 2, "column_blocks": 1}
    assert plan["projected_memory"] <= plan["memory_limit"] == 2**31
    words = ("multiply", tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr", "--verify", "--json")
    done = spdist(*words, "--engine", "scipy")
    report = json.loads(done.stdout)
    assert {"nnz", "blocks", "seconds", "engine", "peak_memory"} <= set(report)
    assert report["verification"]["ok"]
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    assert spdist("export", tmp_path / "C.zarr", tmp_path / "c.npz").returncode == 0
    assert abs(sp.load_npz(tmp_path / "c.npz") - m @ m).max() < 1e-12
    assert spdist("verify", tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr").returncode == 0
    wrong = spdist("verify", tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "A.zarr")
    assert wrong.returncode == 1
    assert wrong.stdout.startswith("FALSE: ")


def test_verify_takes_the_transposes_of_multiply(tmp_path):
    m = random_matrix(60, 90, 6, 1)
    a = api.save(tmp_path / "A.zarr", m)
    for words in (("--transpose-b",), ("--transpose-a", "--top-n", "3")):
        c = ("multiply", a.url, a.url, tmp_path / "C.zarr", *words, "--overwrite")
        assert spdist(*c).returncode == 0
        before = files(tmp_path)
        done = spdist("verify", *c[1:4], *words)
        assert (done.returncode, done.stdout[:10]) == (0, "verified: ")
        assert files(tmp_path) == before
    assert not api.verify(a, a.T, api.save(tmp_path / "D.zarr", m @ m.T + sp.eye_array(60))).ok
    before = files(tmp_path)
    assert "for A @ A.T multiply by A.T, or pass transpose_b (--transpose-b)" in refused(
        "verify", a.url, a.url, tmp_path / "C.zarr"
    )
    words = ("verify", a.url, a.url, tmp_path / "C.zarr", "--transpose-a", "--transpose-b")
    assert "shapes do not fit: A is 90 x 60 and B is 90 x 60" in refused(*words)
    assert files(tmp_path) == before


def test_tables_for_people(tmp_path):
    api.save(tmp_path / "A.zarr", random_matrix(300, 300, 6, 2))
    text = spdist("plan", tmp_path / "A.zarr", tmp_path / "A.zarr").stdout
    for word in ("preprocess", "multiply", "commit", "the run", "projected", "row x"):
        assert word in text
    done = spdist("multiply", tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr", "--workers", "1")
    assert "dashboard: http" in done.stderr
    assert "entries in" in done.stdout


def test_generate_and_verify_commands(tmp_path):
    assert spdist("generate", "poisson", tmp_path / "P.zarr", "--dims", "12x12x12", "--points", "27").returncode == 0
    assert open_matrix(tmp_path / "P.zarr").shape == (1728, 1728)
    assert "poisson" in refused("generate", "nonsense", tmp_path / "Q.zarr")
    assert "--dims" in spdist("generate", "--help").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("info", "{t}/none.zarr"), "there is no such matrix"),
        (("info", "{t}/text"), "not a Zarr group"),
        (("plan", "{t}/A.zarr", "{t}/B.zarr"), "shapes do not fit"),
        (("plan", "{t}/A.zarr", "{t}/A.zarr", "--memory-limit", "lots"), "is not a size"),
        (("plan", "{t}/A.zarr", "{t}/A.zarr", "--grid", "1,2"), "is not a grid"),
        (("plan", "{t}/A.zarr", "{t}/A.zarr", "--engine", "steam"), "engine 'steam' is not one of auto"),
        (("plan", "{t}/A.zarr", "{t}/A.zarr", "--memory-limit", "1MiB"), "raise memory_limit to at least"),
        (("multiply", "{t}/A.zarr", "{t}/A.zarr", "{t}/A.zarr", "--overwrite"), "C may not be A or B"),
        (("multiply", "{t}/A.zarr", "{t}/A.zarr", "{t}/B.zarr"), "exists"),
        (("multiply", "{t}/A.zarr", "{t}/A.zarr", "{t}/B.zarr", "--resume"), "no product of spdist"),
        (("multiply", "{t}/A.zarr", "{t}/A.zarr", "{t}/C.zarr", "--resume", "--overwrite"), "not allowed with"),
        (("multiply", "{t}/A.zarr", "{t}/A.zarr", "{t}/C.zarr", "--workers", "0"), "not a number of at least 1"),
        (("multiply", "{t}/A.zarr", "{t}/U.zarr", "{t}/C.zarr"), "an unfinished product"),
        (("multiply", "{t}/A.zarr", "{t}/A.zarr"), "required: C"),
        (("frobnicate",), "no command 'frobnicate'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(tmp_path, words, message):
    api.save(tmp_path / "A.zarr", random_matrix(30, 40, 3, 3))
    if message not in ("shapes do not fit",):
        api.save(tmp_path / "A.zarr", random_matrix(30, 30, 3, 3), overwrite=True)
    api.save(tmp_path / "B.zarr", random_matrix(30, 30, 3, 4))
    groups.begin(str(tmp_path / "U.zarr"), {})
    (tmp_path / "text").write_text("no matrix")
    before = files(tmp_path)
    assert message in refused(*(word.format(t=tmp_path) for word in words))
    assert files(tmp_path) == before


def test_missing_chunk_is_one_line(tmp_path):
    api.save(tmp_path / "A.zarr", random_matrix(30, 30, 3, 5))
    (tmp_path / "A.zarr/data/c/0").unlink()
    words = ("multiply", tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr")
    assert "chunk 0 of array 'data' (data/c/0) is missing" in refused(*words, code=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_full_disk_midway_is_one_line_and_leaves_a_resumable_product(tmp_path):
    """A limit on file size stands for a full disk: a chunk of C is longer than any file may be."""
    api.save(tmp_path / "A.zarr", random_matrix(400, 400, 40, 6))
    words = ("multiply", tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr", "--grid", "4,1,1")
    assert spdist(*words[:3], tmp_path / "warm.zarr", *words[4:]).returncode == 0  # Numba's cache has long files too
    code = (
        "import resource, signal, sys, spdist.cli\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\nsys.exit(spdist.cli.main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--resume" in done.stderr.strip().splitlines()[-1]
    assert api.info(tmp_path / "C.zarr")["state"] == "unfinished"
    assert spdist(*words, "--resume", "--verify").returncode == 0


# -- kills -------------------------------------------------------------------------------------------------------------


def start(*words: str | Path) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*SPDIST, *map(str, words)], start_new_session=True, **pipes)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return workers_below(process.pid)


def wait_for(condition, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the run did not get there in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a product of some seconds on two processes, and the files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("job")
    api.save(folder / "A.zarr", random_matrix(4000, 4000, 40, 7))
    words = ("multiply", folder / "A.zarr", folder / "A.zarr")
    options = ("--grid", "150,1,1", "--workers", "2", "--memory-limit", "32MiB")
    assert spdist(*words, folder / "R.zarr", *options).returncode == 0
    return words, options, files(folder / "R.zarr")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["client", "worker", "both", "interrupt", "terminate"])
def test_kill_at_a_random_moment_and_resume(job, tmp_path, victim):
    words, options, reference = job
    c = tmp_path / "C.zarr"
    process = start(*words, c, *options)
    wait_for(lambda: (c / "data" / "c").exists() or process.poll() is not None)
    time.sleep(random.Random(victim).uniform(0.0, 1.0))
    if victim in ("worker", "both") and (children := workers_of(process)):
        os.kill(children[0].pid, signal.SIGKILL)
    if victim in ("client", "both"):
        process.kill()
    elif victim == "interrupt":  # as a terminal does: to every process of the job
        os.killpg(process.pid, signal.SIGINT)
    elif victim == "terminate":
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    if victim == "worker":
        assert process.returncode == 0, errors
    elif process.returncode != 0:
        assert api.info(c)["state"] == "unfinished"
        if victim in ("interrupt", "terminate"):
            assert errors.strip().splitlines()[-1] == "spdist: interrupted; continue with --resume"
            assert "Traceback" not in errors
        assert spdist(*words, c, *options, "--resume").returncode == 0
    assert files(c) == reference


@pytest.mark.slow
def test_running_scheduler_from_the_command_line(tmp_path):
    """`dask scheduler` and `dask worker` started by hand; the client only connects."""
    from distributed import LocalCluster

    m = random_matrix(500, 500, 10, 8)
    api.save(tmp_path / "A.zarr", m)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        words = ("multiply", tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr", "--grid", "6,1,1")
        done = spdist(*words, "--scheduler", cluster.scheduler_address, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["blocks"] == 6
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mulitply", "A", "B", "C"], "no command 'mulitply'; did you mean multiply?"),
        (["multiply", "A", "B", "C", "--memry-limit", "1"], "did you mean --memory-limit?"),
        (["multiply", "A", "B", "C", "--memory", "1GiB"], "unrecognized arguments: --memory 1GiB"),  # no abbreviations
        (["multiply", "A", "B"], "required: C (see spdist multiply --help)"),
        (["shortest-paths", "A", "D", "--sources", "0,,1"], "'0,,1' is not a list of vertices: write numbers"),
        (["plan", "A", "B", "--zzz"], "unrecognized arguments: --zzz (see"),
        (["completion", "fish"], "'fish'"),
    ],
)
def test_the_nearest_command_or_option_is_named(words, says, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("words", [["info", "nowhere.zarr"], ["multiply", "a.zarr"], ["plan", "a", "b", "--grid", "1"]])
def test_json_says_why_a_command_failed(words, capsys):
    assert cli.main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["exit_code"] == 2
    assert err == f"spdist: {found['error']}\n"


def test_shells_complete_commands_and_options(capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    check = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (check.returncode, check.stderr) == (0, "")
    assert "--memory-limit" in script
    assert "cluster-keys" in script


def test_an_interrupt_is_answered_at_once_on_a_terminal(tmp_path):
    api.save(tmp_path / "A.zarr", random_matrix(3000, 3000, 40, 1))
    words = [
        *SPDIST,
        "multiply",
        "A.zarr",
        "A.zarr",
        "C.zarr",
        "--engine",
        "scipy",
        "--grid",
        "200,1,1",
        "--workers",
        "1",
    ]
    master, terminal = pty.openpty()
    with subprocess.Popen(words, cwd=tmp_path, stderr=terminal, stdout=terminal, start_new_session=True) as process:
        os.close(terminal)
        seen = b""
        while b"dashboard" not in seen:
            seen += os.read(master, 1000)
        process.send_signal(signal.SIGINT)
        while b"stopping ..." not in seen:
            seen += os.read(master, 1000)
        assert b"interrupted" not in seen
        with contextlib.suppress(OSError):  # the terminal is closed at the end
            while True:
                seen += os.read(master, 1000)
    os.close(master)
    assert process.returncode == 1
    assert seen.count(b"stopping ...") == 1
    assert b"interrupted; continue with --resume" in seen


def test_closed_standard_files_take_no_file_of_a_matrix(tmp_path):
    """Without them the files that are opened next would be stdin, stdout and stderr."""
    words = f"exec {sys.executable} -m spdist generate banded A.zarr --n 9 --bandwidth 0 0<&- 1>&- 2>&-"
    done = subprocess.run(["sh", "-c", words], cwd=tmp_path, timeout=100, check=False)
    assert done.returncode == 0
    assert open_matrix(tmp_path / "A.zarr").nnz == 9


@pytest.mark.parametrize(
    ("seen", "given", "expected"), [(None, "0,2", "0,2"), ("5,6,7", "0,2", "5,7"), ("GPU-a,GPU-b", "1", "GPU-b")]
)
def test_only_the_named_gpus_are_seen(stored, monkeypatch, capsys, seen, given, expected):
    a = stored("A", random_matrix(30, 30, 4, 5)).url
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "to be restored")
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert cli.main(["plan", a, a, "--gpus", given]) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [("0,x", "'0,x' is no list of different numbers"), ("1,1", "different numbers"), ("2", "2 is none of the 2 that")],
)
def test_gpus_that_are_not_there_are_refused(monkeypatch, capsys, given, why):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with contextlib.suppress(SystemExit):
        assert cli.main(["plan", "A", "A", "--gpus", given]) == 2
    assert why in capsys.readouterr().err
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
