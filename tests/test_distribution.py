"""What pip and conda install: the requirements agree, and another project's files are noticed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import spdist
from benchmarks import record
from spdist.foundation.distribution import version_of
from spdist.scheduler.executors.supervision import probe

ROOT = Path(__file__).parent.parent
NAMES_OF_CONDA = {"dask": "dask-core"}


def requirements(lines):
    """Return by package the bounds of its version."""
    parts = [re.fullmatch(r"([\w-]+) ?(.*)", line).groups() for line in lines]
    return {NAMES_OF_CONDA.get(name, name): bounds for name, bounds in parts}


def test_condas_recipe_has_the_requirements_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    recipe = yaml.safe_load((ROOT / "deploy/conda/recipe.yaml").read_text())
    wanted = requirements(project["project"]["dependencies"]) | {"python": project["project"]["requires-python"]}
    assert requirements(recipe["requirements"]["run"]) == wanted
    host = requirements(project["build-system"]["requires"])
    assert host.items() <= requirements(recipe["requirements"]["host"]).items()
    assert recipe["package"]["name"] == project["project"]["name"]
    ((name, place),) = project["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {place}"]


@pytest.mark.parametrize("last", ["this", "other"])
def test_files_of_another_spdist_are_noticed(tmp_path, last):
    shutil.copytree(ROOT / "spdist", tmp_path / "spdist", ignore=shutil.ignore_patterns("__pycache__", "*.zip"))
    library = f"spdist{sysconfig.get_config_var('EXT_SUFFIX')}"
    (tmp_path / "spdist" / library).touch()
    if last == "other":
        (tmp_path / "spdist/__init__.py").write_text("")
    ended = subprocess.run([sys.executable, "-m", "spdist", "--help"], cwd=tmp_path, capture_output=True, text=True)
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
    assert line.startswith("ImportError: ")
    assert library in line
    assert line.endswith("pip uninstall spdist spdist-spgemm, then install spdist-spgemm alone")


def test_versions_are_found_by_the_name_of_the_package():
    assert version_of("spdist") == spdist.__version__ == metadata.version("spdist-spgemm")
    assert version_of("numpy") == metadata.version("numpy")
    assert version_of("none-such") is None
    assert probe.versions()["spdist"] == spdist.__version__
    assert record.versions()["spdist"] == spdist.__version__


# -- the container's entry point ---------------------------------------------------------------------------------------


@pytest.fixture
def container():
    """A folder that every user may read, with programs that print what they were asked, and a cache of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        for name in ("spdist", "dask", "python"):
            program = root / name
            program.write_text(f'#!/bin/sh\necho {name} "$@"; echo "$HOME"; echo "$NUMBA_CACHE_DIR"\n')
            program.chmod(0o755)
        (root / "cache" / "numba").mkdir(parents=True)
        (root / "cache" / "numba" / "kernel.nbc").write_text("compiled")
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o777)
        yield root


def enter(root, *words, home=None, user=None):
    """Return the lines that the program of a container printed: what it was asked, its home, its cache."""
    environment = {
        "PATH": f"{root}:/usr/bin:/bin", "TMPDIR": f"{root}/tmp", "HOME": home or str(root),
        "XDG_CACHE_HOME": f"{root}/cache", "NUMBA_CACHE_DIR": f"{root}/cache/numba",
    }  # fmt: skip
    script = shutil.copy(ROOT / "deploy" / "entrypoint.sh", root / "tmp")
    done = subprocess.run(["/bin/sh", script, *words], env=environment, user=user, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (["multiply", "A B", "--json"], "spdist multiply A B --json"),
        (["spdist", "info"], "spdist info"),
        ([], "spdist"),
        (["dask-worker", "--name", "w 1", "tcp://s:1"], "dask worker --name w 1 tcp://s:1"),
        (["dask-scheduler"], "dask scheduler"),
        (["dask", "worker"], "dask worker"),
        (["python", "job.py"], "python job.py"),
    ],
)
def test_the_first_word_names_the_program_of_a_container(container, words, run):
    assert enter(container, *words) == [run, str(container), f"{container}/cache/numba"]


def test_any_user_of_a_container_finds_the_compiled_kernels(container):
    for folder in ("cache/numba", "cache"):
        (container / folder).chmod(0o555)
    for _ in range(2):
        run, home, cache = enter(container, "info", home="/", user=65_534 if os.getuid() == 0 else None)
        assert (run, home) == ("spdist info", f"{container}/tmp")
        assert cache.startswith(f"{container}/tmp/spdist-cache-")
        assert (Path(cache) / "kernel.nbc").read_text() == "compiled"
        assert Path(cache).stat().st_mode & 0o200
