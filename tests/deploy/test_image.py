"""The Dockerfile: what it copies is there and is sent to the build; `make image` runs its steps."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def image() -> ModuleType:
    """Return deploy/try_image.py as a module."""
    spec = importlib.util.spec_from_file_location("try_image", ROOT / "deploy" / "try_image.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_instructions_are_read(image: ModuleType) -> None:
    text = "# syntax\nFROM a AS b\nRUN one \\\n    # a comment\n    && two\n\nENV A=1\n"
    assert image.instructions(text) == [("FROM", "a AS b"), ("RUN", "one && two"), ("ENV", "A=1")]


def test_what_is_copied_is_sent_to_the_build(image: ModuleType) -> None:
    for kind, rest in image.instructions(DOCKERFILE):
        if kind == "COPY" and not rest.startswith("--from"):
            for pattern in rest.split()[:-1]:
                paths = list(ROOT.glob(pattern))
                assert paths
                assert all(image.is_sent(str(path.relative_to(ROOT))) for path in paths)
    for path in (".git/config", "tests/conftest.py", "spdist/__pycache__/errors.pyc", "build/x", "workflows/job.yaml"):
        assert not image.is_sent(path), path


def test_copies_land_where_docker_puts_them(image: ModuleType, tmp_path: Path) -> None:
    stage = image.Stage(tmp_path / "root", folder="/src")
    (tmp_path / "other/opt/x").mkdir(parents=True)
    (tmp_path / "other/opt/x/file").touch()
    image.copy(["pyproject.toml", "LICENSE", "./"], stage, {})
    image.copy(["spdist/stores", "stores"], stage, {})
    image.copy(["--from=other", "/opt/x", "/opt/x"], stage, {"other": image.Stage(tmp_path / "other")})
    assert (stage.root / "src/LICENSE").is_file()
    assert (stage.root / "src/stores/local.py").is_file()
    assert (stage.root / "opt/x/file").is_file()
    with pytest.raises(SystemExit, match=r"tests/conftest.py is not sent to the build"):
        image.copy(["tests/conftest.py", "./"], stage, {})


def test_it_runs_as_any_user_under_an_init(image: ModuleType) -> None:
    found = dict(image.instructions(DOCKERFILE))
    assert found["USER"] == "1000:1000"
    assert json.loads(found["ENTRYPOINT"]) == ["tini", "--", "/opt/spdist/bin/entrypoint"]
    names = dict(word.split("=", 1) for word in shlex.split(found["ENV"]))
    assert names["DASK_CONFIG"] == "/opt/spdist/share/dask.yaml"
