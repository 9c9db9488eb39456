"""Matrices behind HTTP servers: one that keeps to ranges of bytes, and one that sends whole files."""

from __future__ import annotations

import functools
import http.server
import threading
from pathlib import Path

import pytest
import scipy.sparse as sp
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

import spdist
from spdist.stores.registry import at
from tests.conftest import random_matrix


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Sends whole files, and says nothing."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class _Ranged(_Quiet):
    """Sends the part of a file that is asked for."""

    def do_GET(self) -> None:
        """Answer one request."""
        wanted, path = self.headers.get("Range"), Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            super().do_GET()
            return
        raw = path.read_bytes()
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = (int(first), int(last or len(raw) - 1) + 1) if first else (len(raw) - int(last), len(raw))
        part = raw[start:stop]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(raw)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture(params=[_Quiet, _Ranged])
def url(request, tmp_path):
    """The address of `tmp_path`."""
    handler = functools.partial(request.param, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_matrix_is_read_right(url, tmp_path):
    a = random_matrix(200, 200, 5.0, 1, "int64")
    spdist.save(tmp_path / "A.zarr", a)
    assert spdist.check(f"{url}/A.zarr").ok
    spdist.multiply(f"{url}/A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr", engine="scipy")
    assert abs(spdist.open(tmp_path / "C.zarr").to_scipy() - a @ a).max() == 0


def test_a_file_is_imported(url, tmp_path):
    a = random_matrix(300, 300, 5.0, 2)
    sp.save_npz(tmp_path / "a.npz", a)
    found = spdist.import_matrix(f"{url}/a.npz", tmp_path / "A.zarr")
    assert (found.to_scipy() != a).nnz == 0


def test_parts_of_files(url, tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    store, prototype = at(url).zarr_store(), default_buffer_prototype()
    spans = SuffixByteRequest(4), RangeByteRequest(2, 5), SuffixByteRequest(4)
    found = [at(url).wait(store.get("file", prototype, span)).to_bytes() for span in spans]
    assert found == [b"6789", b"234", b"6789"]
    assert at(url).wait(store.get("none", prototype, spans[0])) is None
