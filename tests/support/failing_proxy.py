"""A server in front of another that fails some requests: busy answers, lost connections, answers that are cut off."""

from __future__ import annotations

import http.client
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")


class FailingProxy:
    """Forwards to a server; ``fault(number, method, path)`` says what happens to a request.

    Parameters
    ----------
    host, port
        Of the server.

    Attributes
    ----------
    fault : callable
        Returns "busy" (503), "reset" (the connection ends), "cut" (half of the body comes) or "".
    failed : list of str
        What happened to requests that failed.
    """

    def __init__(self, host: str, port: int) -> None:
        self.fault: Callable[[int, str, str], str] = lambda number, method, path: ""
        self.failed: list[str] = []
        self._numbers, self._turn = itertools.count(), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_method(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with proxy._turn:
                    what = proxy.fault(next(proxy._numbers), self.command, self.path)
                    if what:
                        proxy.failed.append(what)
                self.close_connection = True
                if what == "reset":
                    return
                if what == "busy":
                    self.answer(503, [("Content-Length", "0")], b"")
                    return
                onward = http.client.HTTPConnection(host, port, timeout=30)
                onward.request(self.command, self.path, body, dict(self.headers) | {"Connection": "close"})
                found = onward.getresponse()
                content = found.read()
                headers = [
                    (k, v) for k, v in found.getheaders() if k.lower() not in ("transfer-encoding", "connection")
                ]
                if not any(k.lower() == "content-length" for k, _ in headers):
                    headers.append(("Content-Length", str(len(content))))
                self.answer(found.status, headers, content[: len(content) // 2] if what == "cut" else content)

            def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                with suppress(OSError):
                    self.send_response_only(status)
                    for header in [*headers, ("Connection", "close")]:
                        self.send_header(*header)
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        for method in METHODS:
            setattr(Handler, f"do_{method}", Handler.handle_one_method)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
