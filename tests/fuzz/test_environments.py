"""A few hostile environments, each in a fresh process; `python -m tests.fuzz.environments` runs hundreds."""

import pytest

from spdist.foundation import settings
from tests.fuzz.environments import Environment, run, write_matrices, wrong

BAD_YAML = {"dask.yaml": "{ : bad"}
HOSTILE = {
    "nothing is compiled": (Environment("alone", {"NUMBA_DISABLE_JIT": "1"}), 2, "NUMBA_DISABLE_JIT=1"),
    "no threads": (Environment("job", {"NUMBA_NUM_THREADS": "0"}), 2, "NUMBA_NUM_THREADS=0"),
    "LLVM would abort": (Environment("info", {"NUMBA_CPU_FEATURES": "x"}), 2, "NUMBA_CPU_FEATURES=x"),
    "a file of Numba": (Environment("edges", {}, {"work/.numba_config.yaml": "opt: fast"}), 2, ".numba_config"),
    "YAML of Dask": (Environment("workers", {"DASK_CONFIG": "{dask}"}, BAD_YAML), 1, "remove what is set: DASK_CONFIG"),
    "YAML of Dask, job": (Environment("job", {"DASK_CONFIG": "{dask}"}, BAD_YAML), 1, ""),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    return folder, write_matrices(folder)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_settings_are_refused_in_a_line_that_names_them(stored, tmp_path, name):
    environment, code, named = HOSTILE[name]
    found, said = run(environment, stored[0], tmp_path)
    assert (found, wrong(environment, found, said, tmp_path, stored[1])) == (code, ""), said
    assert named in said
    assert not [path.name for path in (tmp_path / "work").iterdir() if path.name.startswith("C.zarr")]


def test_an_error_of_a_library_names_what_is_set_and_no_secret(monkeypatch):
    monkeypatch.setenv("FSSPEC_S3_SECRET", "hush")
    glance: dict[str, object] = {"__name__": "fsspec.config"}
    with pytest.raises(ZeroDivisionError) as found:
        exec("1 / 0", glance)
    line = settings.unexpected(found.value)
    assert line.startswith("ZeroDivisionError: division by zero; correct or remove what is set: FSSPEC_S3_SECRET")
    assert "hush" not in line


def test_an_error_of_nobodys_setting_is_a_line_too():
    assert settings.unexpected(KeyError("a\nb")) == (
        "unexpected KeyError: 'a\\nb'; SPDIST_TRACEBACK=1 shows where it came from"
    )
