"""What objects say of themselves in terminals and notebooks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import spdist
from spdist.foundation.display import Drawing, Table, as_html, as_text
from tests.conftest import random_matrix


@pytest.fixture
def plan(stored):
    a = stored("A<b>", random_matrix(3000, 3000, 5, 1))
    return spdist.plan(a, a, memory_limit="64MiB", grid=(40, 1, 3))


@pytest.fixture
def notebook(monkeypatch):
    """Return what a pretended notebook shows, an HTML text each time the cell's output changes."""

    class ZMQInteractiveShell:
        pass

    outputs = []
    handle = SimpleNamespace(update=outputs.append)
    display = SimpleNamespace(HTML=str, display=lambda first, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("spdist.notebook.SECONDS_BETWEEN", 0.0)
    return outputs


def well_formed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def test_html_escapes_and_aligns():
    html = as_html(["1 < 2 & 3", Table(("name", "size"), (("<b>", "4"),), right=("size",), last=("all", "4"))])
    found = well_formed(html)
    assert [cell.text for cell in found.iter("td")] == ["<b>", "4", "all", "4"]
    assert "right" in [*found.iter("th")][1].get("style", "")
    assert found[0].text == "1 < 2 & 3"


def test_text_has_every_cell_and_no_drawing():
    text = as_text(["a line", Table(("one", "two"), (("x", "[y]"),)), Drawing("<svg/>")])
    assert "a line" in text
    assert "[y]" in text
    assert "svg" not in text


def test_a_plan_is_one_line_a_text_and_a_page(plan):
    assert len(repr(plan)) < 300
    assert "40 x 1 x 3 blocks" in repr(plan)
    assert "compression" in str(plan)
    assert len(str(plan)) < 4000
    page = well_formed(plan._repr_html_())
    namespace = "{http://www.w3.org/2000/svg}"
    cut, memory = page.iter(f"{namespace}svg")
    assert len([*cut.iter(f"{namespace}rect")]) == 40 + 1
    assert len([*cut.iter(f"{namespace}line")]) == 2
    assert "of 64.00 MiB" in "".join(memory.itertext())


def test_many_blocks_are_drawn_by_their_sums(stored):
    from spdist.scheduler.planner.drawing import STRIPES, cut_drawing

    blocks = [(i, i + 1, 1) for i in range(10_000)]
    svg = cut_drawing((10_000, 10), blocks, (0, 10)).svg
    assert svg.count("<rect") <= STRIPES + 1
    assert len(svg) < 60_000
    assert "10,000 row blocks" in svg


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_a_plan_of_nothing_is_drawn(stored, shape):
    a = stored("A", random_matrix(*shape, 0, 1))
    b = stored("B", random_matrix(shape[1], 3, 0, 1))
    plan = spdist.plan(a, b, memory_limit="64MiB")
    assert well_formed(plan._repr_html_()) is not None
    assert str(plan)


def test_matrices_reports_and_operators(stored, tmp_path):
    m = random_matrix(50, 50, 3, 2)
    a = stored("A", m)
    report = spdist.multiply(a, a, tmp_path / "C.zarr", memory_limit="64MiB", check=True)
    assert str((m @ m).nnz) in repr(report).replace(",", "")
    assert "verified" in str(report)
    assert "wall seconds" in report._repr_html_()
    assert "50 x 50" in a._repr_html_()
    assert "float64" in a._repr_html_()
    operator = spdist.operator(m, "sell")
    assert "sell" in operator._repr_html_().lower()
    for shown in (report, a, operator):
        well_formed(shown._repr_html_())


def test_a_notebook_shows_progress_and_then_the_report_alone(stored, tmp_path, notebook):
    a = stored("A", random_matrix(3000, 3000, 30, 3))
    spdist.multiply(a, a, tmp_path / "C.zarr", memory_limit="64MiB", grid=(8, 1, 1), workers=1)
    assert any("<progress" in html and "blocks" in html for html in notebook)
    assert any("dashboard" in html for html in notebook)
    assert notebook[-1] == ""
    for html in notebook[:-1]:
        well_formed(html.replace("<br>", "<br/>"))


def test_own_callbacks_silence_the_bar(stored, tmp_path, notebook):
    a = stored("A", random_matrix(30, 30, 3, 3))
    plans = []
    spdist.multiply(a, a, tmp_path / "C.zarr", callbacks=spdist.Callbacks(planned=plans.append))
    assert notebook == []
    assert len(plans) == 1


def test_a_failed_product_takes_its_bar_away(stored, tmp_path, notebook):
    a = stored("A", random_matrix(30, 30, 3, 3))
    with pytest.raises(spdist.InputError):
        spdist.multiply(a, a, tmp_path / "C.zarr", memory_limit="0")
    assert notebook[-1:] == [""]


def test_plain_processes_show_nothing(stored, tmp_path, capfd):
    a = stored("A", random_matrix(30, 30, 3, 3))
    spdist.multiply(a, a, tmp_path / "C.zarr")
    assert capfd.readouterr() == ("", "")
