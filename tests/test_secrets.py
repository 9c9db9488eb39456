"""Passwords, keys and tokens in places are in no line, file, report, record and page, whatever a command comes to."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pty
import random
import subprocess
import sys
import threading
import traceback
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import psutil
import pytest
import yaml
from distributed import Client, LocalCluster
from fsspec.config import conf

import spdist
from spdist import cli, shown
from spdist.api import products
from spdist.cli import console
from spdist.errors import one_line
from spdist.foundation.display import Table, as_text
from spdist.scheduler.executors.clients.cluster import connect
from spdist.storage.groups import read_facts
from tests.conftest import WORKFLOWS, load_workflow, random_matrix

CANARY = "CaNaRy7x"
"""Part of every secret."""

FORMS = {
    "password": "http://user:{secret}@{host}/{name}",
    "password and port": "https://user:{secret}@127.0.0.1:1/{name}",
    "slash in it": "http://user:a/{secret}@{host}/{name}",
    "slash behind": "http://user:{secret}/b@{host}/{name}",
    "question mark in it": "http://user:a?{secret}@{host}/{name}",
    "hash in it": "http://user:a#{secret}@{host}/{name}",
    "at in it": "http://user:a@{secret}@{host}/{name}",
    "space in it": "http://user:a {secret}@{host}/{name}",
    "quote in it": "http://user:a'{secret}@{host}/{name}",
    "percent": "http://user:a%40{secret}%2F@{host}/{name}",
    "bracket": "http://user:[{secret}@{host}/{name}",
    "user alone": "http://{secret}@{host}/{name}",
    "no host": "http://user:{secret}",
    "token": "http://{host}/{name}?token={secret}",
    "signed": "http://{host}/{name}?X-Amz-Date=1&X-Amz-Signature={secret}&se=2",
    "query alone": "http://{host}/{name}?{secret}",
    "nameless": "http://{host}/{name}?v=a&{secret}",
    "fragment": "http://{host}/{name}#access_token={secret}",
    "one slash": "http:/user:{secret}@{host}/{name}",
    "no scheme": "user:{secret}@{host}/{name}",
    "capitals": "HTTP://user:{secret}@{host}/{name}",
    "cached": "simplecache::http://user:{secret}@{host}/{name}",
    "packed": "zip://{name}::http://user:{secret}@{host}/a.zip",
    "inner": "http://user:{secret}@{host}/{name}::X",
    "s3": "s3://KEY:{secret}@bucket/{name}",
    "s3 version": "s3://bucket/{name}?token={secret}",
    "az": "az://container:{secret}@account.dfs.core.windows.net/{name}",
    "ftp": "ftp://user:{secret}@127.0.0.1:1/{name}",
    "unknown": "nosuch+scheme://user:{secret}@host/{name}",
    "memory": "memory://user:{secret}@host/{name}",
}  # fmt: skip
"""Forms of places with a secret."""

COMMANDS = {
    "import": "import PLACE new.zarr", "import named": "import PLACE new.zarr --names --format abc",
    "import to": "import k.abc PLACE --names", "labels": "import k.abc new.zarr --labels PLACE",
    "export": "export PLACE new.mtx", "export to": "export A.zarr PLACE --format binsparse",
    "export file": "export A.zarr PLACE", "export out": "export PLACE - --format mtx",
    "info": "info PLACE", "info json": "info PLACE --json", "spy": "info A.zarr --spy PLACE", "check": "check PLACE",
    "folder": "info --machine --folder PLACE", "status": "status PLACE", "transpose": "transpose PLACE new.zarr",
    "transpose to": "transpose A.zarr PLACE", "symmetrize": "symmetrize PLACE new.zarr",
    "generate": "generate banded PLACE --n 5", "plan": "plan PLACE A.zarr", "plan b": "plan A.zarr PLACE --json",
    "multiply a": "multiply PLACE A.zarr new.zarr", "multiply b": "multiply A.zarr PLACE new.zarr --json",
    "multiply c": "multiply A.zarr A.zarr PLACE", "mask": "multiply A.zarr A.zarr new.zarr --mask PLACE",
    "resume": "multiply A.zarr A.zarr PLACE --resume", "record": "multiply A.zarr A.zarr new.zarr --record PLACE",
    "report of": "multiply A.zarr A.zarr new.zarr --report PLACE",
    "scheduler": "multiply A.zarr A.zarr new.zarr --scheduler PLACE",
    "verify": "verify A.zarr A.zarr PLACE", "verify a": "verify PLACE A.zarr A.zarr",
    "reduce": "reduce nnz A.zarr PLACE", "reduce to": "reduce row_sums A.zarr A.zarr --out PLACE",
    "similarity": "similarity PLACE new.zarr", "cooccurrence": "cooccurrence PLACE new.zarr",
    "triangles": "triangles PLACE", "triangles in": "triangles k.abc --folder PLACE",
    "paths": "shortest-paths PLACE new.zarr", "paths to": "shortest-paths A.zarr PLACE",
    "pagerank": "pagerank PLACE new.npy", "pagerank to": "pagerank A.zarr PLACE",
    "clusters": "markov-clustering PLACE -o new.txt", "clusters out": "markov-clustering PLACE -o - --abc",
    "clusters to": "markov-clustering A.zarr -o PLACE", "report": "report PLACE new.html", "keys": "cluster-keys PLACE",
    "unknown option": "info A.zarr --bogus PLACE", "wrong value": "multiply A.zarr A.zarr new.zarr --grid PLACE",
    "unknown command": "PLACE",
}  # fmt: skip
"""Commands that take a place."""


class Files(SimpleHTTPRequestHandler):
    """Serves a folder, whoever asks, and logs nothing."""

    def do_GET(self) -> None:
        """Answer with a file, or the part that is asked for."""
        path, part = Path(self.translate_path(self.path)), self.headers.get("Range")
        if part is None or not path.is_file():
            super().do_GET()
            return
        content, (start, _, stop) = path.read_bytes(), part.removeprefix("bytes=").partition("-")
        first = int(start) if start else max(len(content) - int(stop), 0)
        found = content[first : int(stop) + 1 if start and stop else None]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(found) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def host(tmp_path, monkeypatch) -> Iterator[str]:
    """Return the address of a server of the current folder, which has a matrix and a list of edges."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shown, "_remembered", {})
    Path("k.abc").write_text("a b 1\nb c 2\nc a 3\n")
    spdist.save("A.zarr", random_matrix(5, 5, 2, 1))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        at = f"127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{at}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{CANARY}-key")
        yield at
        server.shutdown()
        thread.join()


def place(form: str, host: str, name: str = "k.abc") -> str:
    return FORMS[form].format(secret=f"s{CANARY}s", host=host, name=name)


def leaks() -> list[str]:
    """Return the files below the current folder that hold a secret."""
    files = (path for path in Path().rglob("*") if path.is_file())
    return [str(path) for path in files if CANARY.encode() in path.read_bytes()]


def run(command: str, place: str) -> int:
    return cli.main([place if word == "PLACE" else word for word in COMMANDS[command].split()])


LOCAL = {("keys", "one slash"), ("keys", "no scheme"), ("unknown command", "no scheme")}
"""Cases whose place is a local path that is stored to be used."""

CASES = [case for case in itertools.product(COMMANDS, FORMS) if case not in LOCAL]
FEW = random.Random(7).sample(CASES, 40) + [("import named", form) for form in FORMS]


@pytest.mark.parametrize(("command", "form"), CASES if "SPDIST_ALL_SECRETS" in os.environ else FEW)
def test_no_command_shows_or_stores_a_secret(host, capfd, command, form):
    run(command, place(form, host, "A.zarr" if "zarr" in command else "k.abc"))
    said = "".join(capfd.readouterr())
    assert CANARY not in said
    assert leaks() == []


def test_what_is_imported_says_from_where_without_the_secret(host):
    for form, shown_as in {
        "password": "http://***@HOST/k.abc", "signed": "http://HOST/k.abc?***", "user alone": "http://***@HOST/k.abc",
    }.items():  # fmt: skip
        assert run("import named", place(form, host)) == 0
        found = read_facts("new.zarr")["provenance"]["source"]
        assert found == shown_as.replace("HOST", host)
        spdist.transpose("new.zarr", "old.zarr", overwrite=True)
        subprocess.run(["rm", "-r", "new.zarr"], check=True)


def test_a_matrix_that_has_a_secret_already_is_described_without(host, capfd):
    """By an older version of spdist."""
    file = Path("A.zarr/zarr.json")
    document = json.loads(file.read_text())
    document["attributes"]["spdist"]["provenance"] = {"source": place("password", host)}
    del document["attributes"]["spdist"]["seal"]
    file.write_text(json.dumps(document))
    assert run("info", "A.zarr") == run("info json", "A.zarr") == 0
    said = capfd.readouterr().out
    assert (said.count("http://***@"), CANARY in said) == (2, False)
    assert CANARY not in str(products.info("A.zarr"))


def test_a_place_that_can_be_read_is_told_without_the_secret(host, capfd):
    assert run("info json", f"http://user:{CANARY}@{host}/A.zarr") == 0
    assert json.loads(capfd.readouterr().out)["matrix"] == f"http://***@{host}/A.zarr"


def test_a_run_keeps_no_secret_in_its_record_and_reports(host, capfd):
    a = f"http://user:{CANARY}@{host}/A.zarr"
    words = f"multiply {a} A.zarr C.zarr --record run.jsonl --report run.html --grid 2,1,1"
    assert cli.main(words.split()) == 0
    assert cli.main([*words.split(), "--resume", "--verify"]) == 0  # it is known by its content, not by its place
    assert cli.main(["report", "run.jsonl", "again.html"]) == 0
    assert CANARY not in "".join(capfd.readouterr())
    assert leaks() == []
    shown_as = f"http://***@{host}/A.zarr"
    assert all(shown_as in Path(name).read_text() for name in ("C.zarr/zarr.json", "run.jsonl", "again.html"))


def test_files_of_a_run_hold_none_while_it_runs(host, monkeypatch):
    """Plan, journal and lock: the same that a killed run leaves."""
    a = f"http://user:{CANARY}@{host}/A.zarr"
    monkeypatch.setattr(sys, "argv", ["script", a])
    seen: list[str] = []

    def look(_: object) -> None:
        assert leaks() == []
        seen.extend(path.name for path in Path().rglob("*spdist-*"))

    spdist.multiply(a, "A.zarr", "C.zarr", grid=(3, 1, 1), callbacks=spdist.Callbacks(planned=look, progress=look))
    assert {"C.zarr.spdist-lock", "spdist-plan"} <= set(seen)


def test_processes_are_started_without_secrets(host):
    with connect(workers=1, scheduler=None, processes=True, blocks=2):
        lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert lines
    assert CANARY not in str(lines)


def test_the_note_of_a_checked_matrix_holds_none(host):
    spdist.save("A.zarr", random_matrix(5, 5, 2, 1), overwrite=True)
    file = Path("A.zarr/zarr.json")
    document = json.loads(file.read_text())
    del document["attributes"]["spdist"]
    file.write_text(json.dumps(document))
    spdist.multiply(f"http://user:{CANARY}@{host}/A.zarr", "A.zarr", "C.zarr")
    notes = [path.read_text() for path in Path("cache/spdist/checked").iterdir()]
    assert f"http://***@{host}/A.zarr\n" in notes
    assert leaks() == []


def test_an_error_that_nobody_expected_shows_none():
    program = (
        "import sys, logging; from spdist.cli import entry; import spdist.cli.entry as e\n"
        "def fail(): logging.getLogger('other').error('http://user:k3yw0rd@h/log'); raise KeyError(sys.argv[1])\n"
        "e.main = fail; e.command()"
    )
    words = [sys.executable, "-c", program, f"http://user:{CANARY}@host"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (done.returncode, CANARY in done.stderr, "k3yw0rd" in done.stderr) == (1, False, False)
    assert "KeyError: 'http://***@host'" in done.stderr
    assert "http://***@h/log" in done.stderr


def test_an_old_record_with_a_secret_makes_a_page_without(host):
    assert cli.main(["multiply", "A.zarr", "A.zarr", "C.zarr", "--record", "run.jsonl"]) == 0
    record = Path("run.jsonl")
    record.write_text(record.read_text().replace(str(Path("A.zarr").resolve()), place("password", host)))
    assert leaks() == ["run.jsonl"]
    assert cli.main(["report", "run.jsonl", "run.html"]) == 0
    assert leaks() == ["run.jsonl"]


def test_pages_of_a_scheduler_show_none(host):
    a = f"http://user:{CANARY}@{host}/A.zarr"
    with LocalCluster(1, processes=False, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
        spdist.multiply(a, "A.zarr", "C.zarr", scheduler=client, grid=(2, 1, 1))
        pages = f"http://127.0.0.1:{cluster.scheduler.http_server.port}"
        for page in ("spdist/data.json", "metrics", "info/main/logs.html", "info/main/workers.html"):
            with urllib.request.urlopen(f"{pages}/{page}", timeout=60) as answer:
                assert CANARY not in answer.read().decode()
        events = client.get_events()
        assert CANARY not in str(events)
        assert f"http://***@{host}/A.zarr" in str(events)
        assert CANARY not in str(client.get_worker_logs())


@pytest.mark.parametrize("form", [form for form in FORMS if form != "s3 version"])  # which is tried again for seconds
def test_a_traceback_in_a_script_shows_none(host, form):
    lines = ""
    for call in (
        spdist.open,
        products.info,
        partial(spdist.import_matrix, target="new.zarr", format="abc", names=True),
    ):
        try:
            call(place(form, host, "missing.abc"))
        except spdist.SpdistError as error:
            lines += "".join(traceback.format_exception(error))
        except OSError as error:
            lines += shown.without_secrets(str(error))
    assert lines
    assert CANARY not in lines


def test_log_records_hold_none(caplog):
    logging.getLogger("spdist").warning("%s: no answer", "http://user:secret@host/k.abc")
    assert caplog.messages == ["http://***@host/k.abc: no answer"]


JOBS = {
    "multiply": {"a": "PLACE", "b": "A.zarr", "out": "C.zarr"},
    "similarity": {"a": "PLACE", "out": "C.zarr"},
    "markov_clustering": {"a": "A.zarr", "out": "PLACE"},
    "shortest_paths": {"a": "A.zarr", "out": "PLACE"},
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("form", ["password", "slash in it", "s3", "ftp", "unknown", "no scheme"])
def test_jobs_write_none(host, capfd, name, form):
    job = {key: place(form, host, "A.zarr") if value == "PLACE" else value for key, value in JOBS[name].items()}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    load_workflow(name).main(["job.yaml"])
    Path("job.yaml").unlink()
    assert CANARY not in "".join(capfd.readouterr())
    assert leaks() == []


def test_a_job_knows_its_result_again_by_the_report(host):
    spdist.save("lengths.zarr", abs(random_matrix(5, 5, 2, 1)))
    out = "memory://user:secret@here/C.zarr"
    Path("job.yaml").write_text(yaml.safe_dump({"a": "lengths.zarr", "out": out}))
    assert load_workflow("shortest_paths").main(["job.yaml"]) == 0
    assert json.loads(Path("job.report.json").read_text())["job"]["out"] == "memory://***@here/C.zarr"
    assert load_workflow("shortest_paths").main(["job.yaml"]) == 0
    assert load_workflow("shortest_paths").main(["job.yaml", "--set", "report=other.json"]) == 2


# -- keys of the environment -------------------------------------------------------------------------------------------


def test_keys_that_a_server_repeats_are_hidden(host, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"AKIA{CANARY}")
    answer = (
        f"403: <Error><AWSAccessKeyId>AKIA{CANARY}</AWSAccessKeyId> key {CANARY}-key <StringToSign>AWS4 x</StringTo"
    )
    assert CANARY not in str(spdist.InputError(answer))
    assert "AWS4" not in str(spdist.InputError(answer))


def test_keys_of_fsspec_are_hidden(monkeypatch):
    monkeypatch.setitem(conf, "s3", {"key": f"k{CANARY}", "client_kwargs": {"aws_secret_access_key": f"{CANARY}2"}})
    assert shown.without_secrets(f"wrong k{CANARY}, {CANARY}2") == "wrong ***, ***"


def test_a_reader_of_foreign_files_has_no_keys(host, tmp_path, monkeypatch):
    environments = []
    start = subprocess.Popen

    def note(*args, **options):
        environments.append(options.get("env"))
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", note)
    h5py.File("m.mat", "w").close()
    assert cli.main(["import", "m.mat", "new.zarr"]) == 2
    assert environments
    assert CANARY not in str(environments)


# -- one function ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/data@2/A.zarr", "http://host:8080/v@2/k.abc", "tls://127.0.0.1:8786; write tcp://HOST:PORT",
        "az://container@account.dfs.core.windows.net/A.zarr", "tcp://[::1]:8786)", "inproc://10.0.0.1/7/1",
        "memory://A.zarr", "/data/run:2/A.zarr", "C.zarr: 3 entries in 0.5 s, top_n=3", "a <tls://1.2.3.4:5>: gone",
        "tcp://1.2.3.4:5->tcp://1.2.3.4:6", "file:///data/A.zarr",
    ],
)  # fmt: skip
def test_places_without_secrets_stay_as_they_are(text):
    assert shown.without_secrets(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("'Authorization': 'Bearer abcdefgh'", "'Authorization': 'Bearer ***'"),
        ("AccountName=a;AccountKey=abc==;x", "AccountName=a;AccountKey=***;x"),
        ("b'/A.zarr/?token=abc/indptr'", "b'/A.zarr/?token=***'"),
        ("{'secret': 'abc', 'anon': False}", "{'secret': '***', 'anon': False}"),
    ],
)
def test_secrets_outside_of_places_are_known_by_their_names(text, clean):
    assert shown.without_secrets(text) == clean


def test_a_secret_is_hidden_before_a_text_is_cut():
    text = one_line("http://user:" + 200 * "pass" + f"@host/{'x' * 300}", 100)
    assert "pass" not in text
    assert len(text) <= 100


def test_long_text_takes_no_long_time():
    """Each pattern goes through it once: these take minutes where time grows with the square."""
    for text in ("a" * 300_000, "a.b-" * 75_000, "token" * 60_000, "a:b" * 100_000 + "@", "http:" * 60_000):
        shown.without_secrets(text)


# -- terminals ---------------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;title\x07\x1b[31m\u202eevil\x9b"
"""Sets the title of a terminal, colours it red, and turns the direction of text."""


@pytest.mark.parametrize(
    "words",
    [
        "info EVIL.zarr", "info missing-EVIL", "check EVIL.zarr", "status EVIL.zarr", "export EVIL.zarr EVIL.mtx",
        "multiply EVIL.zarr EVIL.zarr C-EVIL.zarr", "verify EVIL.zarr EVIL.zarr EVIL.zarr", "plan EVIL.zarr EVIL.zarr",
        "import EVIL.abc new-EVIL.zarr --names", "import k.abc A.zarr --bogus-EVIL", "transpose EVIL.zarr A.zarr",
        "markov-clustering EVIL.abc -o EVIL.txt", "pagerank EVIL.abc EVIL.npy", "shortest-paths EVIL.abc D-EVIL.zarr",
        "reduce row_sums EVIL.zarr EVIL.zarr --out EVIL.npy", "generate EVIL A.zarr", "report EVIL.jsonl EVIL.html",
        "cluster-keys keys-EVIL", "triangles EVIL.abc --folder missing-EVIL", "EVIL",
    ],
)  # fmt: skip
def test_no_command_prints_control_characters(host, capfd, words):
    spdist.save(f"{EVIL}.zarr", random_matrix(5, 5, 2, 1))
    Path(f"{EVIL}.abc").write_text(f"a{EVIL} b 1\nb c{EVIL} 2\nc{EVIL} a{EVIL} 3\n")
    cli.main([word.replace("EVIL", EVIL) for word in words.split()])
    said = "".join(capfd.readouterr())
    assert [char for char in said if not (char.isprintable() or char == "\n")] == []


def test_data_on_standard_output_stays_as_it_is(host, capfdbinary):
    text = f"a{EVIL}\tb\t1\n".encode()
    Path("k.abc").write_bytes(text)
    assert cli.main(["import", "k.abc", "names.zarr", "--names"]) == 0
    capfdbinary.readouterr()
    assert cli.main(["export", "names.zarr", "-", "--format", "abc"]) == 0
    assert capfdbinary.readouterr().out.startswith(f"a{EVIL}".encode())
    assert cli.main(["markov-clustering", "k.abc", "-o", "-"]) == 0
    assert EVIL.encode() in capfdbinary.readouterr().out


def test_names_that_go_to_a_terminal_are_escaped(host):
    Path("k.abc").write_text(f"a{EVIL}\tb\t1\n")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "spdist", "markov-clustering", "k.abc", "-o", "-"]
    environment = os.environ | {"PYTHONPATH": str(WORKFLOWS.parent)}
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, env=environment, timeout=100)
    assert (done.returncode, os.read(ours, 1000)) == (0, rb"a\x1b]0;title\x07\x1b[31m\u202eevil\x9b" + b"\tb\r\n")
    os.close(ours)
    os.close(theirs)


def test_names_in_a_page_are_text(host):
    name = "</script><img src=x onerror=alert(1)>.zarr"
    spdist.save("memory://" + name, random_matrix(5, 5, 2, 1), overwrite=True)
    spdist.multiply("memory://" + name, "A.zarr", "C.zarr", report="run.html")
    assert "<img src=x" not in Path("run.html").read_text()
    assert "<img" not in spdist.open("memory://" + name)._repr_html_()


def test_cells_of_tables_are_escaped():
    assert as_text([Table((), (("matrix", f"{EVIL} http://user:k3yw0rd@h/A"),))]).endswith(r"\x9b http://***@h/A")


def test_a_bar_takes_brackets_as_text(monkeypatch, capfd):
    from rich.console import Console

    monkeypatch.setattr(console, "_console", lambda *, stderr=False: Console(stderr=stderr, force_terminal=True))
    with console.transfer_bar(f"importing [/a]{EVIL}") as bar:
        bar(1, 2)
    said = capfd.readouterr().err
    assert "[/a]" in said
    assert "title\x07" not in said
