"""The products under torture: small, of many row blocks and Zarr chunks, with the bytes that C must have."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.runs import Launcher

LIMIT = ("--memory-limit", "8MiB")
"""Makes Zarr chunks of some thousand elements."""
ROWS = "2000"
PATIENCE = 30.0
"""A command hangs after so many times the seconds of an undisturbed one; a fresh one needs five times as long."""


@dataclass(frozen=True)
class Product:
    """A product to torture.

    Attributes
    ----------
    name : str
    options : tuple of str
        After ``multiply A B C``; ``{mask}`` stands for the mask.
    replaces : bool
        Whether C replaces an old one.
    workers : int
        Processes that multiply; 0 for threads of the one that was started.
    limited : bool
        Whether the memory limit makes several blocks and Zarr chunks of it.
    """

    name: str
    options: tuple[str, ...]
    replaces: bool = False
    workers: int = 2
    limited: bool = True


PRODUCTS = (
    Product("plain", ("--grid", "8,1,1")),
    Product("replaced", ("--grid", "8,1,1"), replaces=True),
    Product("inner", ("--grid", "4,2,2")),
    Product("masked", ("--grid", "6,1,1", "--mask", "{mask}")),
    Product("min_plus", ("--grid", "5,1,1", "--semiring", "min_plus")),
    Product("by_columns", ("--top-n", "5", "--axis", "0"), limited=False),
    Product("threads", ("--grid", "8,1,1"), workers=0),
    Product("threads_replaced", ("--grid", "4,2,2"), replaces=True, workers=0),
    Product("alone", ("--grid", "1,1,1"), workers=0, limited=False),
    Product("alone_replaced", ("--grid", "1,1,1"), replaces=True, workers=0, limited=False),
)


def digests(matrix: Path) -> dict[str, str]:
    """Return a digest of every file of a matrix; of its attributes without those that say where it comes from."""
    found = {}
    for path in sorted(matrix.rglob("*")):
        if path.is_file():
            name, content = str(path.relative_to(matrix)), path.read_bytes()
            if name == "zarr.json":
                with suppress(ValueError):  # damaged: as it is
                    content = json.dumps(_without_origin(json.loads(content)), sort_keys=True).encode()
            found[name] = hashlib.blake2b(content, digest_size=12).hexdigest()
    return found


def _without_origin(document: Any) -> Any:
    """Return a document without the entries that differ between equal products."""
    if not isinstance(document, dict):
        return document
    return {key: _without_origin(value) for key, value in document.items() if key not in ORIGIN}


ORIGIN = {"provenance", "run", "run_id", "time", "date", "group"}
"""Names of attributes that may differ between two runs of one product; ``group`` is a digest of the attributes."""


def claims_to_be_whole(matrix: Path) -> bool:
    """Whether a reader takes what lies here for a matrix."""
    try:
        attributes = json.loads((matrix / "zarr.json").read_text())["attributes"]
    except (OSError, ValueError, KeyError):
        return False
    return "encoding-type" in attributes


@dataclass
class Stock:
    """Operands, and the expected bytes of each product, made once by undisturbed runs.

    Attributes
    ----------
    folder : Path
    launcher : Launcher
    expected : dict
        Digests of C's files, by product.
    varying : dict
        Files of C whose bytes differ between two undisturbed runs, by product; they must exist.
    seconds : dict
        What an undisturbed run takes, by product.
    """

    folder: Path
    launcher: Launcher
    expected: dict[str, dict[str, str]] = field(default_factory=dict)
    varying: dict[str, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def make(self) -> Stock:
        """Make the operands; expected products are made when they are first needed."""
        (self.folder / "expected").mkdir(parents=True)
        for name, seed, per_row in (("A0", 1, 12), ("B0", 2, 12), ("M0", 3, 30)):
            self._run("generate", "erdos-renyi", self.folder / f"{name}.zarr", "--nrows", ROWS, "--ncols", ROWS,
                      "--per-row", str(per_row), "--seed", str(seed))  # fmt: skip
        self._run("generate", "banded", self.folder / "D.zarr", "--n", ROWS, "--bandwidth", "0")
        for name in "ABM":  # products have shorter Zarr chunks than what is generated, so that there are several
            self._run("multiply", self.folder / f"{name}0.zarr", self.folder / "D.zarr", self.folder / f"{name}.zarr",
                      "--grid", "4,1,1", "--workers", "1", "--memory-limit", "7MiB")  # fmt: skip
        return self

    def whole(self, product: Product) -> Path:
        """Return an expected product."""
        self._expect(product)
        return self.folder / "expected" / f"{product.name}-1.zarr"

    def seconds_of(self, product: Product) -> float:
        """Return what an undisturbed run takes."""
        self._expect(product)
        return self.seconds[product.name]

    def _expect(self, product: Product) -> None:
        """Make a product twice, unless that was done before."""
        if product.name in self.expected:
            return
        found = []
        for turn in "12":
            target = self.folder / "expected" / f"{product.name}-{turn}.zarr"
            self.seconds[product.name] = self._run("multiply", *self.words(product, target))
            found.append(digests(target))
        first, second = found
        assert first.keys() == second.keys(), product
        varying = {name for name in first if first[name] != second[name]}
        assert not [name for name in varying if "/c/" in name], f"two runs of {product} differ in {varying}"
        self.expected[product.name], self.varying[product.name] = first, varying
        self.launcher.seconds = max(self.launcher.seconds, PATIENCE * self.seconds[product.name])

    def _run(self, *words: str | Path) -> float:
        import time

        begin = time.perf_counter()
        run = self.launcher.start(self.folder, "stock", [*words, "--json"])
        assert run.wait(180), f"{words} hangs"
        assert run.code == 0, f"{words}: {run.err}"
        return time.perf_counter() - begin

    def words(self, product: Product, target: Path, operands: Path | None = None) -> list[str]:
        """Return the arguments after ``multiply``; the operands lie in `operands`, by default in the stock."""
        at = operands or self.folder
        options = [option.format(mask=at / "M.zarr") for option in product.options]
        limit = LIMIT if product.limited else ()
        workers = ("--workers", str(product.workers)) if product.workers else ()
        matrices = str(at / "A.zarr"), str(at / "B.zarr"), str(target)
        return [*matrices, *options, *limit, *workers, "--engine", "numba"]

    def difference(self, product: Product, target: Path, *, notes: bool = True) -> str:
        """Return how C differs from what it must be; empty if it does not.

        Without `notes` only arrays are compared: a C that was made from changed operands names these.
        """
        self._expect(product)
        expected, varying = self.expected[product.name], self.varying[product.name]
        if not target.exists():
            return "C is not there"
        found = digests(target)
        lacking = sorted(expected.keys() - found.keys())
        added = sorted(found.keys() - expected.keys())
        changed = sorted(name for name in expected.keys() & found.keys() - varying
                         if expected[name] != found[name] and (notes or "/" in name))  # fmt: skip
        parts = [f"{what} {', '.join(names[:4])}" for what, names in
                 (("lacks", lacking), ("has too much:", added), ("differs in", changed)) if names]  # fmt: skip
        return "; ".join(parts)
