"""What Numba keeps to itself and kernels subclass: a canary for each new version of Numba."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import pickle
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from spdist.kernels.cpu import numba_compile

ROOT = Path(__file__).parents[3]
USED = {
    "numba.core": {"cgutils", "event"},
    "numba.core.base": {"BaseContext"},
    "numba.core.caching": {"FunctionCache", "IndexDataCacheFile", "NullCache"},
    "numba.core.codegen": {"JITCodeLibrary"},
    "numba.core.compiler": {"Compiler"},
    "numba.core.compiler_machinery": {"PassManager", "register_pass"},
    "numba.core.dispatcher": {"Dispatcher"},
    "numba.core.errors": {"NumbaError"},
    "numba.core.typed_passes": {"NativeLowering"},
    "numba.np.numpy_support": {"as_dtype", "from_dtype"},
}
"""Names that Numba does not document, by module."""
CALLED = {
    "numba.core.caching.FunctionCache.load_overload": ["self", "sig", "target_context"],
    "numba.core.caching.FunctionCache.save_overload": ["self", "sig", "data"],
    "numba.core.caching.FunctionCache._load_overload": ["self", "sig", "target_context"],
    "numba.core.caching.FunctionCache._guard_against_spurious_io_errors": ["self"],
    "numba.core.caching.IndexDataCacheFile.__init__": ["self", "cache_path", "filename_base", "source_stamp"],
    "numba.core.caching.IndexDataCacheFile._load_index": ["self"],
    "numba.core.codegen.JITCodeLibrary._optimize_final_module": ["self"],
    "numba.core.codegen.JITCodeLibrary._finalize_final_module": ["self"],
    "numba.core.codegen.JITCodeLibrary._finalize_dynamic_globals": ["self"],
    "numba.core.compiler.Compiler.define_pipelines": ["self"],
    "numba.core.typed_passes.NativeLowering.run_pass": ["self", "state"],
}
"""Methods that are overridden or called, with their parameters."""


def undocumented_imports() -> dict[str, set[str]]:
    """Return what the package imports from modules of Numba that are no public ones."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "spdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("numba.core", "numba.np")):
                found.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
    return found


def test_undocumented_names_are_few_and_there():
    assert undocumented_imports() == USED
    for module, names in USED.items():
        assert names <= set(dir(importlib.import_module(module)))


@pytest.mark.parametrize("name", CALLED)
def test_a_method_takes_what_it_took(name):
    module, kind, method = name.rsplit(".", 2)
    found = getattr(getattr(importlib.import_module(module), kind), method)
    assert list(inspect.signature(found).parameters) == CALLED[name]


def test_a_cache_of_classes_that_were_renamed_is_empty(tmp_path):
    """As after an upgrade: what Numba reads first must not stop a product."""
    cache = numba_compile._CacheFile(str(tmp_path), "kernel", "sources")
    cache.save("types", "code")
    index, moved = tmp_path / "kernel.nbi", pickle.dumps(numba_compile._CacheFile)
    assert cache.load("types") == "code"
    version = pickle.dumps(cache._version)
    index.write_bytes(version + moved.replace(b"_CacheFile", b"_CacheFilo"))
    assert cache.load("types") is None
    cache.save("types", "newer code")
    assert cache.load("types") == "newer code"


def test_no_version_is_allowed_that_was_not_tried():
    """The bound is raised by who has run these tests with the next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (numba,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "numba")
    assert Version(importlib.metadata.version("numba")) in numba.specifier
    assert Version("1000") not in numba.specifier
