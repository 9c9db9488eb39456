"""ARCHITECTURE.md against the files: what lies where, and which module imports which."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spdist"
BLOCKS = re.findall(r"```\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
TREE = next(block for block in BLOCKS if block.startswith("spdist/"))
IMPORTS = next(block for block in BLOCKS if block.startswith("errors "))


def tree_files() -> Iterator[str]:
    """Yield the files that the tree names, as paths from the root."""
    folders: list[str] = []
    for line in TREE.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name]
        yield "".join(folders)


NAMED = list(tree_files())
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}
LEVEL = {module: number for number, line in enumerate(IMPORTS.splitlines()) for module in line.split()}


def imported(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, at its top or inside a function; of spdist without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(path: Path) -> set[str]:
    """Return the modules of spdist that a file imports; ``""`` for a name of the top-level package."""
    names = [name.removeprefix("spdist").lstrip(".") for name in imported(path) if name.split(".")[0] == "spdist"]
    return {next((m for m in (name, name.rpartition(".")[0]) if m in MODULES), "") for name in names}


def outside(path: Path) -> set[str]:
    """Return the packages that a file imports."""
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("name", NAMED)
def test_tree_names_what_exists(name):
    assert list(ROOT.glob(name.rstrip("/")))


def test_tree_names_every_module():
    files = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert files == {name for name in NAMED if name.startswith("spdist/") and name.endswith(".py")}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_import(module):
    importlib.import_module(f"spdist.{module}")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_up_the_list_only(module):
    top_level = {""} if module == "cli" else set()  # --version
    wrong = {name for name in inside(MODULES[module]) - top_level if not name or LEVEL[name] >= LEVEL[module]}
    assert not wrong


def test_every_module_has_its_line():
    assert set(LEVEL) == set(MODULES)


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("kernels.")))
def test_kernels_know_only_arrays(module):
    assert all(name in ("csr", "errors", "text") or name.startswith("kernels.") for name in inside(MODULES[module]))
    assert not outside(MODULES[module]) & {"zarr", "dask", "distributed"}


@pytest.mark.parametrize("module", ["scheduler.plan", "scheduler.memory"])
def test_plans_are_arithmetic(module):
    assert not outside(MODULES[module]) & {"zarr", "dask", "distributed", "cupy"}
    assert "storage" not in inside(MODULES[module])


def test_only_storage_imports_zarr():
    assert {module for module, path in MODULES.items() if outside(path) & {"zarr", "zarrs"}} == {"storage"}


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.py")), ids=lambda path: path.name)
def test_workflows_use_public_names(path):
    import spdist

    tree = ast.parse(path.read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "spdist"}
    assert not {name for name in imported(path) if name.startswith("spdist.")}
    assert used <= set(spdist.__all__)
