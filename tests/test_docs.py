"""Documents: their code runs, their command lines parse, and what they name exists."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import io
import itertools
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

import spdist
from spdist import cli
from tests.support.cpus import pretend_cpus

ROOT = Path(__file__).resolve().parent.parent
TOP = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
WORKFLOWS = sorted((ROOT / "docs" / "workflows").glob("*.md"))
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
DOCUMENTS = [*TOP, ROOT / "deploy" / "README.md", *GUIDE, *WORKFLOWS, *DESIGN]
FOLDERS = ("spdist", "tests", "docs", "benchmarks", "workflows", "deploy", "data")
SUFFIXES = ("py", "cu", "cuh", "md", "yaml", "toml", "sbatch", "json")
FIGURE = re.compile(r"\d\s?(ms|us|s|GB/s|MB/s|TFLOP/s)\b|\d times as (fast|quick|long)")


RIDDLE = re.compile(r"\b(that of|those of|of which|so many|(?:is|are) none|as few|told)\b")
"""Phrases that leave a noun out, or say something in a riddle; CONTRIBUTING.md, "Style"."""


class Fence(NamedTuple):
    """A fenced block of a document."""

    language: str
    mark: str
    """What the comment on the line before says: ``gpu`` or nothing."""
    text: str


class ParsedError(SystemExit):
    """Raised in place of running a command."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fences(path: Path) -> list[Fence]:
    found = re.findall(r"(?:<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [Fence(language, mark, text) for mark, language, text in found]


def prose(path: Path) -> str:
    """Return a document without fenced blocks, and without the tables that a script writes."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!-- figures:.*?<!-- end of figures -->", "", text, flags=re.DOTALL)


def python_blocks(path: Path) -> list[Fence]:
    return [fence for fence in fences(path) if fence.language == "python"]


def run(blocks: list[Fence], path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks one after the other, in one namespace."""
    monkeypatch.chdir(folder)
    (folder / "data").symlink_to(ROOT / "data")
    namespace: dict[str, Any] = {"__name__": "document"}
    for fence in blocks:
        exec(compile(fence.text, name_of(path), "exec"), namespace)


RUNNABLE = [path for path in DOCUMENTS if python_blocks(path)]


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_code_runs(path, tmp_path, monkeypatch):
    run([fence for fence in python_blocks(path) if not fence.mark], path, tmp_path, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("path", [p for p in RUNNABLE if any(f.mark == "gpu" for f in python_blocks(p))], ids=name_of)
def test_code_runs_on_a_gpu(path, tmp_path, monkeypatch):
    run([fence for fence in python_blocks(path) if fence.mark in ("", "gpu")], path, tmp_path, monkeypatch)


def test_all_code_is_run():
    assert not [name_of(path) for path in RUNNABLE for fence in python_blocks(path) if fence.mark not in ("", "gpu")]


def commands(path: Path) -> Iterator[str]:
    """Yield the shell commands of a document."""
    for fence in fences(path):
        if fence.language in ("", "sh"):
            for line in fence.text.replace("\\\n", " ").splitlines():
                yield line.removeprefix("$ ").partition("  #")[0].strip()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_command_lines_parse(path, monkeypatch):
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        real(self, *args, **kwargs)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for command in commands(path):
        if command.startswith("spdist "):
            with pytest.raises(ParsedError):
                cli.main(shlex.split(command)[1:])


CALLS = re.compile(r"\b(?:save|similarity|multiply|import_matrix)\((?:[^()]|\([^()]*\))*\)")
WRITERS = "import", "pagerank", "similarity", "cooccurrence", "shortest-paths"
"""Commands whose second argument is what they write."""


def outputs(path: Path) -> Iterator[str]:
    """Yield what the commands and the code of a page write; without what they replace."""
    for fence in fences(path):
        for call in CALLS.findall(fence.text) if fence.language == "python" else ():
            if "overwrite=True" not in call:
                yield from re.findall(r"[\"'](\w+\.zarr)[\"']", call)
    for command in commands(path):
        words = shlex.split(command)
        if words[:1] == ["spdist"] and words[1] in WRITERS:
            yield words[3]
        elif "-o" in words:
            yield words[words.index("-o") + 1]
        elif words[:1] == ["python"] and len(words) > 2 and words[2].endswith(".yaml"):
            keys = dict(word.split("=", 1) for flag, word in itertools.pairwise(words) if flag == "--set")
            yield keys.get("out") or yaml.safe_load((ROOT / words[2]).read_text())["out"]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "workflows").glob("*.md")), ids=name_of)
def test_commands_of_a_page_find_no_output_of_an_earlier_one(path):
    found = list(outputs(path))
    assert len(set(found)) == len(found), found


def test_plan_prints_what_readme_shows(tmp_path, monkeypatch, capsys):
    shown = next(fence.text for fence in fences(ROOT / "README.md") if "$ spdist plan" in fence.text).splitlines()
    generate = next(command for command in commands(ROOT / "README.md") if command.startswith("spdist generate"))
    monkeypatch.chdir(tmp_path)
    pretend_cpus(monkeypatch, 2)
    assert cli.main(shlex.split(generate)[1:]) == 0
    capsys.readouterr()
    assert cli.main(shlex.split(shown[0])[2:]) == 0
    assert capsys.readouterr().out.splitlines()[: len(shown) - 2] == shown[1:-1]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_scripts_and_targets_exist(path):
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for command in commands(path):
        words = command.split()
        if words[:1] == ["make"] and len(words) > 1 and "=" not in words[1] and not words[1].startswith("."):
            assert words[1] in targets, command
        for word in words:
            if word.split("/")[0] in FOLDERS and word.endswith(SUFFIXES) and "NAME" not in word:
                assert (ROOT / word).exists(), command


def exists(name: str) -> bool:
    """Whether a dotted name below ``spdist`` can be imported."""
    module: Any = spdist
    for at, part in enumerate(name.split(".")):
        if isinstance(module, ModuleType) and not hasattr(module, part):
            try:
                module = importlib.import_module(".".join(["spdist", *name.split(".")[: at + 1]]))
            except ModuleNotFoundError:
                return False
        elif hasattr(module, part):
            module = getattr(module, part)
        else:
            return False
    return True


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_names_exist(path):
    names = set(re.findall(r"(?<![\w/.-])spdist\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", path.read_text()))
    assert not {name for name in names if not exists(name)}


def files_named(path: Path) -> set[str]:
    """Return the files and folders that inline code names: those with a slash or the ending of a source file."""
    words = {word for span in re.findall(r"`([^`\n]+)`", prose(path)) for word in span.split()}
    words |= {word for fence in fences(path) if fence.language == "text" for word in fence.text.split()}
    words = {word.rstrip(".,:;") for word in words}
    return {
        word for word in words
        if re.fullmatch(r"\.?[\w][\w./*-]*", word)
        and ((word.split("/")[0] in FOLDERS and "/" in word) or re.fullmatch(r"[a-z_]\w*\.(py|cu|cuh)", word))
        and not re.search(r"NAME|NNN|JOB", word)
    }  # fmt: skip


@pytest.fixture(scope="module")
def file_names() -> set[str]:
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_exist(path, file_names):
    named = files_named(path)
    missing = {name for name in named if "/" in name and not list(ROOT.glob(name.rstrip("/")))}
    missing |= {name for name in named if "/" not in name and name not in file_names}
    assert not missing


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *(ROOT / "docs").glob("*.md"), ROOT / "CHANGELOG.md", ROOT / "data" / "README.md"], ids=name_of
)
def test_links_work(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *GUIDE], ids=name_of)
def test_figures_are_in_generated_tables(path):
    """Times and rates drift; docs/measured.md and README's table are written from records."""
    assert not [line for line in prose(path).splitlines() if FIGURE.search(line)]


def test_measured_is_what_records_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("measured", ROOT / "docs" / "measured.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "measured.md").read_text() == module.measured(), "stale: run python docs/measured.py"
    readme = (ROOT / "README.md").read_text()
    assert readme == module.readme(readme), "stale: run python docs/measured.py"


def test_papers_are_what_records_say(monkeypatch, tmp_path):
    """Each paper has its part; without records the page says which are missing."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    papers, tables = importlib.import_module("papers"), importlib.import_module("tables")
    assert (ROOT / "docs" / "papers.md").read_text() == papers.page(), "stale: run python docs/papers.py"
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    without = papers.page()
    assert without.count("Not recorded with this code") == without.count("\n## ") == len(papers.SECTIONS) == 5


@pytest.mark.parametrize("path", [path for path in DESIGN if path.name != "README.md"], ids=name_of)
def test_decisions_have_their_parts(path):
    text = path.read_text()
    assert re.match(r"\d{3}-[a-z-]+\.md", path.name)
    assert "\nStatus: " in text
    assert all(f"\n## {part}\n" in text for part in ("Context", "Decision", "Alternatives refused"))
    assert f"]({path.name})" in (ROOT / "docs" / "design" / "README.md").read_text()


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines of documents, and of docstrings and comments of a Python file, with their numbers."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(text := getattr(child.value, "value", None), str):
                yield from enumerate(text.splitlines(), child.lineno)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


PROSE = [
    *DOCUMENTS, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.*"), *(ROOT / "workflows").iterdir(),
    *(ROOT / "spdist").rglob("*.py"),
]  # fmt: skip


@pytest.mark.parametrize("path", [path for path in PROSE if path.suffix in (".md", ".py", ".yaml")], ids=name_of)
def test_prose_names_its_nouns(path):
    assert not [(at, line.strip()) for at, line in words_of(path) if RIDDLE.search(line)]


@pytest.mark.parametrize(("name", "most"), [("README.md", 180), ("ARCHITECTURE.md", 150)])
def test_a_page_is_a_page(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_architecture_names_every_folder():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path.parent.name for path in (ROOT / "spdist").rglob("__init__.py")}
    assert not {folder for folder in folders if f"{folder}/" not in text}


def test_reference_has_every_public_name():
    names = re.findall(r"^   spdist\.(\w+)$", (ROOT / "docs" / "api" / "index.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted(spdist.__all__)


def test_site_has_every_page():
    listed = (ROOT / "docs" / "index.md").read_text()
    assert all(f"\nguide/{path.stem}\n" in listed for path in GUIDE)


def test_version_is_one(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == spdist.__version__
