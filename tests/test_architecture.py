"""Folders are layers: what each may import, and the files that documents name."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = set(re.findall(r"^ +spdist\.(?:\w+\.)*(\w+)$", (ROOT / "docs/api/index.md").read_text(), re.M))
SECTIONS = re.compile(r"^(Parameters|Attributes|Returns|Yields|Raises)\n-+$", re.M)
PACKAGE = ROOT / "spdist"
GROUND = {"shown", "errors", "foundation"}
ARRAYS = GROUND | {"matrices"}
LAYERS = {  # folder or file at the top -> what it may import, besides itself
    "shown": set(),
    "errors": {"shown"},
    "foundation": {"shown", "errors"},
    "stores": GROUND,
    "matrices": GROUND,
    "kernels": ARRAYS,
    "storage": ARRAYS | {"stores", "kernels"},
    "interop": ARRAYS | {"storage"},
    "verification": ARRAYS | {"stores", "kernels", "storage"},
    "options": GROUND | {"kernels"},
    "inmemory": ARRAYS | {"options", "kernels"},
    "scheduler.planner": ARRAYS | {"stores", "kernels", "storage"},
    "scheduler.clusters": GROUND,
    "scheduler.dashboard": GROUND,
    "scheduler.execution": ARRAYS | {"stores", "kernels", "storage", "scheduler.planner", "scheduler.dashboard"},
    "scheduler.executors": ARRAYS
    | {
        "stores",
        "kernels",
        "storage",
        "scheduler.planner",
        "scheduler.clusters",
        "scheduler.dashboard",
        "scheduler.execution",
    },
    "operators": ARRAYS | {"kernels", "storage", "inmemory", "scheduler.executors"},
    "jobs": ARRAYS
    | {
        "options",
        "stores",
        "kernels",
        "storage",
        "verification",
        "inmemory",
        "interop",
        "scheduler.planner",
        "scheduler.execution",
        "scheduler.executors",
        "scheduler.dashboard",
    },
}
TOP = ["api", "applications", "notebook", "neighbors", "torch", "cli", "__main__", "__init__"]
PARTS = [*LAYERS, *TOP]
FAMILIES = {  # folder of kernels -> the folders of kernels that it may import
    "cuda": set(),
    "cpu": set(),
    "dense": {"cpu", "cuda"},
    "rowwise_gpu": {"cuda"},
    "batch_gpu": {"cuda", "rowwise_gpu"},
    "esc": {"cuda"},
    "hyspmm": {"cuda", "cpu"},
    "bsr": {"cuda", "cpu", "rowwise_gpu"},
    "spmv": {"cuda", "cpu", "bsr"},
    "streaming": {"cuda", "cpu", "rowwise_gpu", "hyspmm", "bsr"},
    "shipped": {"cuda", "rowwise_gpu", "batch_gpu", "dense", "esc", "hyspmm", "bsr", "spmv", "streaming"},
}
NAMES_OF_ENGINES = {"scipy", "numba", "cuda", "hybrid"}
OTHER_MEANINGS = {  # files in which these words name packages, a folder, or formats for products with vectors
    "foundation/settings.py", "jobs/compiling/ahead.py", "kernels/cuda/module.py", "operators/choice.py",
    "operators/estimates.py",
    "scheduler/execution/announcer.py",
}  # fmt: skip
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


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


def part(module: str) -> str:
    """Return the layer that a module belongs to."""
    return next((name for name in PARTS if module == name or module.startswith(f"{name}.")), "")


def within(folder: str) -> dict[str, Path]:
    return {module: path for module, path in MODULES.items() if part(module) == folder}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_import(module):
    importlib.import_module(f"spdist.{module}")


def test_every_module_belongs_to_a_layer():
    assert not {module for module in MODULES if not part(module)}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_those_below(layer):
    allowed = LAYERS[layer] | {layer}
    found = {(module, name) for module, path in within(layer).items() for name in inside(path)}
    assert not {(module, name) for module, name in found if part(name) not in allowed}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_kernels_imports_what_it_builds_on(family):
    folder = PACKAGE / "kernels" / family
    names = {name for path in folder.rglob("*.py") for name in inside(path) if name.count(".") >= 2}
    assert {name.split(".")[1] for name in names} <= FAMILIES[family] | {family}


def test_every_family_has_a_rule():
    assert {path.name for path in (PACKAGE / "kernels").iterdir() if path.is_dir()} - {"__pycache__"} == set(FAMILIES)


def test_no_import_cycle():
    """Of files, wherever in them the import is."""
    below = {module: inside(path) & set(MODULES) for module, path in MODULES.items()}
    while True:
        ready = {module for module, names in below.items() if not names & set(below)}
        if not ready:
            break
        below = {module: names for module, names in below.items() if module not in ready}
    assert not below


@pytest.mark.parametrize("layer", ["kernels", "scheduler.execution"])
def test_a_layer_knows_no_zarr_and_no_dask(layer):
    assert not {m for m, path in within(layer).items() if outside(path) & {"zarr", "dask", "distributed"}}


@pytest.mark.parametrize("module", ["scheduler.planner.plan", "scheduler.planner.memory"])
def test_plans_are_arithmetic(module):
    assert not outside(MODULES[module]) & {"zarr", "dask", "distributed", "cupy"}
    assert not {name for name in inside(MODULES[module]) if part(name) == "storage"}


def test_only_storage_imports_zarr():
    found = {part(module) for module, path in MODULES.items() if outside(path) & {"zarr", "zarrs"}}
    assert found == {"storage", "stores"}


def test_only_stores_ask_where_bytes_are():
    """Others call a method of the location, or ask for what they want to know; few do."""
    names, asked = (
        re.compile(r'startswith\(\(?"(memory|file|s3|https?):|"://"'),
        re.compile(r"\.(has_files|is_private|transfers_chunks)\b"),
    )
    others = {module: path.read_text() for module, path in MODULES.items() if part(module) != "stores"}
    assert {module for module, text in others.items() if names.search(text)} == {
        "shown",  # secrets in URLs
        "scheduler.clusters.addresses", "scheduler.clusters.security",  # of schedulers
        "jobs.operands",  # Zarr's text for a store
    }  # fmt: skip
    assert sum(len(asked.findall(text)) for text in others.values()) <= 12
    assert not {module for module, text in others.items() if re.search(r"\b\w+Location\b", text)}


def test_folders_stay_small():
    """No folder of more than 16 source files, and no file of more than 600 lines."""
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        sources = [path for path in folder.iterdir() if path.suffix in (".py", ".cu", ".cuh")]
        assert len([path for path in sources if path.name != "__init__.py"]) <= 16, folder
    sources = [path for path in PACKAGE.rglob("*.*") if path.suffix in (".py", ".cu", ".cuh")]
    assert not {path.name for path in sources if len(path.read_text().splitlines()) > 600}


def documented(node: ast.AST, public: bool) -> Iterator[tuple[str, str]]:
    """Yield the names and docstrings of classes and functions that are not public: neither exported nor in such."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = child.name
            exported = name in PUBLIC if isinstance(node, ast.Module) else public and not name.startswith("_")
            if not exported:
                yield name, ast.get_docstring(child) or ""
            yield from documented(child, exported)


@pytest.mark.parametrize("path", list(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_public_names_have_sections(path):
    """A sentence, and a line for a shape, a unit or an error, is enough for those who read the code."""
    tree = ast.parse(path.read_text())
    assert not [name for name, text in documented(tree, False) if SECTIONS.search(text)]


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.py")), ids=lambda path: path.name)
def test_workflows_use_public_names(path):
    import spdist

    tree = ast.parse(path.read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "spdist"}
    assert not {name for name in imported(path) if name.startswith("spdist.")}
    assert used <= {*spdist.__all__, "__version__"}


def test_few_files_name_an_engine():
    """All others ask the object: `spdist.kernels.engine`. "auto" is not counted, which is every default."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        file = str(path.relative_to(PACKAGE))
        if path.name != "engine.py" and file not in OTHER_MEANINGS:
            nodes = ast.walk(ast.parse(path.read_text()))
            count = sum(isinstance(n, ast.Constant) and str(n.value) in NAMES_OF_ENGINES for n in nodes)
            found |= {file: count} if count else {}
    assert found == {
        "inmemory/block_operands.py": 3,  # methods of `spgemm` for blocks; entries of a VBR
        "inmemory/host_operands.py": 3,  # methods of `spgemm`
        "kernels/bsr/multiply_cpu.py": 2,  # the pattern of dense blocks
        "kernels/cpu/workspace.py": 2,  # the two kernels
        "operators/partitioned.py": 1,  # workers with GPUs
    }
