"""Kernels that came compiled: an archive is used for the sources that it was made of, and for no others."""

from __future__ import annotations

import json
import logging
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from spdist.kernels.cuda import cubins
from spdist.kernels.cuda.module import FOLDER, options
from spdist.kernels.shipped import build
from spdist.kernels.shipped.every_kernel import kernels_by_file

FILE = "rowwise_gpu/rows.cu"
DIGEST = cubins.source_digest((FOLDER / FILE).read_bytes(), options(FILE))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Let the archives be in an empty folder."""
    monkeypatch.setattr(cubins, "FOLDER", tmp_path)
    cubins.archive_for.cache_clear()
    yield tmp_path
    cubins.archive_for.cache_clear()
    cubins.loaded_cubin.cache_clear()


def compiled(architecture: str) -> build.Compiled:
    return build.Compiled(
        build.Job(FILE, ("publish", "list_rows"), architecture), b"code", {"publish": "_Z7", "list_rows": "_Z9"}
    )


def test_an_archive_gives_back_what_it_was_made_of(folder):
    build.write_archive("sm_90", [compiled("sm_90")], 13000)
    archive = cubins.Archive(folder / "sm_90.zip")
    assert archive.find(FILE, DIGEST, ["publish"]) == {"publish": ("0.cubin", "_Z7")}
    assert archive.read("0.cubin") == b"code"
    assert archive.find(FILE, DIGEST, ["publish", "another"]) is None
    assert archive.find(FILE, "0" * 32, ["publish"]) is None, "of other sources"
    assert archive.find("esc/short_rows.cu", DIGEST, ["publish"]) is None
    first = (folder / "sm_90.zip").read_bytes()
    build.write_archive("sm_90", [compiled("sm_90")], 13000)
    assert (folder / "sm_90.zip").read_bytes() == first
    assert [path.name for path in folder.iterdir()] == ["sm_90.zip"]


def test_the_digest_is_of_source_and_options_but_of_no_folder():
    known = cubins.source_digest(b"x", ["-DA=1", "-I/a"])
    assert known == cubins.source_digest(b"x", ["-DA=1", "-I/b"])
    assert len({known, cubins.source_digest(b"y", ["-DA=1"]), cubins.source_digest(b"x", ["-DA=2"])}) == 3


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [("90", 13010, True), ("90", 12080, False), ("89", 13000, True), ("86", 13000, True), ("75", 13000, False),
     ("100", 13000, False)],
)  # fmt: skip
def test_an_archive_of_the_same_generation_is_taken(folder, monkeypatch, capability, driver, expected):
    for architecture in ("sm_80", "sm_90"):
        build.write_archive(architecture, [compiled(architecture)], 13000)
    runtime = SimpleNamespace(driverGetVersion=lambda: driver)
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda n: device))
    )
    assert (cubins.archive_for(0) is not None) == expected


def truncated(path):
    path.write_bytes(path.read_bytes()[:-30])


def without_index(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0.cubin", b"code")


def with_another_index(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(cubins.INDEX, json.dumps({"cuda_version": 13000}))


@pytest.mark.parametrize("damage", [truncated, without_index, with_another_index])
def test_a_damaged_archive_is_said_and_not_used(folder, monkeypatch, caplog, damage):
    build.write_archive("sm_90", [compiled("sm_90")], 13000)
    damage(folder / "sm_90.zip")
    device = SimpleNamespace(compute_capability="90")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda n: device)))
    with caplog.at_level(logging.WARNING, logger="spdist"):
        assert cubins.archive_for(0) is None
    assert "sm_90.zip is damaged" in caplog.text


def test_jobs_hold_every_kernel_of_the_usual_types_once():
    jobs = build.jobs_for("sm_90")
    held = [(job.file, name) for job in jobs for name in job.names]
    assert len(held) == len(set(held))
    by_types = (kernels_by_file(*types).items() for types in build.TYPES)
    assert set(held) == {(file, name) for files in by_types for file, names in files for name in names}


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_compiled(folder, monkeypatch):
    """Of the kernels in the archive; others are compiled as ever."""
    import cupy
    from cupyx.scipy import sparse

    from spdist.inmemory.spgemm import spgemm
    from spdist.kernels.cuda import module

    device = cupy.cuda.Device()
    architecture, done = f"sm_{device.compute_capability}", []
    for file, names in kernels_by_file("double", "int", "int").items():
        if file.startswith("rowwise_gpu/") and "finished" not in file:
            chosen, source = tuple(sorted(names)), (FOLDER / file).read_text()
            cubin, lowered = cupy.cuda.compiler.compile_using_nvrtc(
                source, options(file), device.compute_capability, "kernels.cu", chosen
            )
            done.append(build.Compiled(build.Job(file, chosen, architecture), cubin, lowered))
    build.write_archive(architecture, done, cupy.cuda.runtime.driverGetVersion())
    module._module.cache_clear()
    monkeypatch.setattr(cupy, "RawModule", lambda **what: pytest.fail("a kernel is compiled"))
    rng = np.random.default_rng(0)
    a = sp.random_array((3_000, 3_000), density=0.003, rng=rng, format="csr")
    long_rows = sp.random_array((3_000, 4), density=0.4, rng=rng) @ sp.random_array((4, 3_000), density=0.01, rng=rng)
    a = a + long_rows
    on_gpu = sparse.csr_matrix(sp.csr_matrix(a))
    c = spgemm(on_gpu, on_gpu).get()
    module._module.cache_clear()
    assert abs(c - a @ a).max() < 1e-9
