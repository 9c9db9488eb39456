"""Dask's pages on a cluster that spdist started: there when somebody asks, and only then."""

from __future__ import annotations

import concurrent.futures
import importlib
import urllib.error
import urllib.request
from urllib.parse import urljoin

import pytest

from spdist.scheduler.dashboard import late_pages
from spdist.scheduler.executors.clients.cluster import connect
from spdist.scheduler.executors.clients.members import dashboard_link


@pytest.fixture
def link():
    with connect(workers=None, scheduler=None, processes=True, blocks=2) as client:
        yield dashboard_link(client)


def get(url: str) -> tuple[str, str]:
    """Return where a request ended, and the answer."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.geturl(), answer.read().decode()


def test_pages_come_with_the_first_request(link, monkeypatch):
    loaded = []
    load = importlib.import_module

    def note(name, *package):
        loaded.append(name)
        return load(name, *package)

    monkeypatch.setattr(late_pages.importlib, "import_module", note)
    assert "Workers" in get(urljoin(link, "/info/main/workers.html"))[1]
    assert loaded == []
    where, page = get(link)
    assert where == link
    assert "bokeh" in page
    assert "spdist" in page  # in the menu
    assert get(urljoin(link, "/"))[0] == link
    assert loaded.count(late_pages.PAGES) == 1


def test_many_first_requests_at_once(link):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(get, [link] * 8))
    assert all("bokeh" in page for _, page in answers)


def test_without_bokeh_the_answer_says_what_is_missing(link, monkeypatch):
    def missing(name, *package):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(late_pages.importlib, "import_module", missing)
    with pytest.raises(urllib.error.HTTPError, match="503") as raised:
        get(link)
    assert "pip install" in raised.value.read().decode()
    monkeypatch.undo()
    assert "bokeh" in get(link)[1]


def test_an_unknown_page_is_not_found(link):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(urljoin(link, "/no-such-page"))
