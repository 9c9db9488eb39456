"""Names by which the pages of a scheduler may be requested.

A website can let its own name point to this machine (DNS rebinding), and would then read the pages in the browser of a
user who visits it. The request still says for which name it is, in ``Host``, and from which website, in ``Origin``.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import Any
from urllib.parse import urlsplit

import dask
import psutil
from distributed import Scheduler
from tornado.httputil import HTTPServerRequest, split_host_and_port
from tornado.web import RequestHandler

VARIABLE = "SPDIST_DASHBOARD_HOSTS"
"""Environment variable: other names of the scheduler, such as a proxy's, with commas between; * for all."""

PROXIES = ("JUPYTERHUB_PUBLIC_URL", "JUPYTERHUB_PUBLIC_HUB_URL", "JUPYTERHUB_HOST")
"""Environment variables in which JupyterHub says under which address it forwards requests."""


def refused_name(host: str, origin: str | None = None) -> str:
    """Return which of two headers of a request, if any, does not name this machine; empty if both do."""
    hosts = [host] if origin is None else [host, urlsplit(origin).netloc or origin]
    return next((host for host in hosts if not _is_known(_name_of(host))), "")


def _refused(request: HTTPServerRequest) -> str:
    return refused_name(request.host, request.headers.get("Origin"))


def _name_of(host: str) -> str:
    """Return a host without its port and brackets."""
    return split_host_and_port(host.strip().lower())[0].strip("[]").rstrip(".")


def _is_known(name: str) -> bool:
    given = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
    links = [os.environ.get(variable, "") for variable in PROXIES] + [dask.config.get("distributed.dashboard.link", "")]
    known = {"localhost", socket.gethostname().lower(), *map(_name_of, given)}
    known |= {_name_of(urlsplit(str(link)).netloc) for link in links}
    return "*" in given or (name != "" and (name in known or name in _addresses() or name == _full_name()))


def _addresses() -> set[str]:
    """Return the addresses of this machine."""
    found = {one.address.partition("%")[0].lower() for each in psutil.net_if_addrs().values() for one in each}
    return {"127.0.0.1", "::1", *found}


@functools.cache
def _full_name() -> str:
    return socket.getfqdn().lower()  # asks a name server, which may take seconds


class CheckedHandler(RequestHandler):
    """Refuses requests for a name that is not this machine's."""

    def prepare(self) -> None:
        """Answer with one line that says how to add the name."""
        if name := _refused(self.request):
            self.set_status(403)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"no page for {ascii(name)[1:-1]}: to allow a name, set {VARIABLE} where the scheduler runs\n")


def check_hosts(scheduler: Scheduler) -> None:
    """Let a scheduler that was started here check the requests for all its pages, Dask's too."""
    application: Any = scheduler.http_application
    find = application.find_handler

    def checked(request: HTTPServerRequest, **options: Any) -> Any:
        if _refused(request):
            return application.get_handler_delegate(request, CheckedHandler)
        return find(request, **options)

    application.find_handler = checked
