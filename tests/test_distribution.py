"""What pip and conda install: the requirements agree, and another project's files are noticed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
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
