"""The kernels that multiply rows of C, compiled for one choice of types; and the facts that they report.

Kernels are named here by short names of ours, such as ``"fill 3"``; C++ name expressions stay in this file.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from spdist.kernels.cuda.constants import ROW_CLASSES, NodeFact, RowFact
from spdist.kernels.cuda.module import Module, module
from spdist.kernels.rowwise_gpu.row_classes import SINGLE_PASS_CLASSES, SORT_CLASSES

COUNTS = len(RowFact)
"""Place in the facts of the rows of each class."""
TAKEN = COUNTS + ROW_CLASSES
"""Place of the rows of each class that `list_rows` has listed."""
NODES = TAKEN + ROW_CLASSES
"""Place of the `NodeFact` figures of each class."""
WIDTHS = NODES + len(NodeFact) * ROW_CLASSES
"""Place of the columns of the widest part of a row of each class."""
SAMPLED = WIDTHS + ROW_CLASSES
"""Place of the products and the entries of the sampled rows."""
FACTS = SAMPLED + 2
"""64-bit words of all facts."""
NODE_WARPS = 2
"""Warps of a thread block that multiplies nodes."""


class RowKernels:
    """The compiled kernels for C types of values, columns and offsets; compiled on first use, file by file.

    `defines`: compiler options of a semiring, for the files that multiply.
    """

    def __init__(self, value: str, index: str, pointer: str, defines: tuple[str, ...] = ()) -> None:
        self.types, self.defines = (value, index, pointer), defines
        self.names = _kernel_names(value, index, pointer)

    def with_wide_keys(self) -> RowKernels:
        """Return the kernels for rows whose columns are too far apart for 32-bit sort keys."""
        wide = RowKernels(*self.types, self.defines)
        sort = wide.names["rowwise_gpu/sort_rows.cu"]
        for name in sort:
            sort[name] = sort[name].replace(",u32,", ",u64,")
        return wide

    def name_expressions(self) -> dict[str, tuple[str, ...]]:
        """Return the name expressions to compile of each file."""
        return {file: tuple(names.values()) for file, names in self.names.items()}

    @functools.cached_property
    def _modules(self) -> dict[str, Module]:
        return {}

    def compile(self) -> None:
        """Compile all files now, side by side; what was compiled before comes from the cache on disk.

        A product that compiled file by file on first use would wait for the sum of the times, not for the longest.
        """
        if len(self._modules) == len(self.names):
            return
        import cupy

        modules = {file: self._module(file) for file in self.names}
        with ThreadPoolExecutor(len(modules), initializer=cupy.cuda.Device().use) as pool:
            list(pool.map(lambda loaded: loaded.compile(), modules.values()))
        self._modules.update(modules)

    def launch(
        self, file: str, name: str, grid: int | tuple[int, int], block: int, args: tuple[Any, ...], shared: int = 0
    ) -> None:
        """Launch a kernel of `file` by our name for it, on the current stream; the rest as for `Module`."""
        loaded = self._modules.get(file)
        if loaded is None:
            loaded = self._modules[file] = self._module(file)
        loaded(self.names[file][name], grid, block, args, shared)

    def _module(self, file: str) -> Module:
        defines = () if file == "rowwise_gpu/rows.cu" else self.defines  # nothing is multiplied there
        return module(file, tuple(self.names[file].values()), defines)


def _kernel_names(value: str, index: str, pointer: str) -> dict[str, dict[str, str]]:
    """Return, for each file, our names and the name expressions of its kernels."""
    ip, vip = f"{index},{pointer}", f"{value},{index},{pointer}"
    return {
        "rowwise_gpu/rows.cu": {
            "list": "list_rows",
            "offsets": f"offsets<{pointer}>",
            "publish": "publish",
            "enter": f"enter_rows<{ip}>",
            **{f"analyse {g}": f"analyse_rows<{ip},{g}>" for g in (2, 4, 8, 32)},
            "analyse long": f"analyse_long<{ip}>",
        },
        "rowwise_gpu/sort_rows.cu": _sort_names(ip, vip),
        "rowwise_gpu/node_rows.cu": {
            **{f"same {g}": f"same_rows<{ip},{g}>" for g in (8, 32)},
            "find": f"find_nodes<{ip}>",
            "count": f"node_count<{ip},{NODE_WARPS}>",
            "fill": f"node_fill<{vip},{NODE_WARPS},false>",
            "fill single": f"node_fill<{vip},{NODE_WARPS},true>",
        },
        "rowwise_gpu/rank_rows.cu": {
            "split": f"split_rows<{ip}>",
            **{f"count {w}": f"rank_count<{ip},{w}>" for w in (4, 8)},
            **{f"fill {w} {o}": f"rank_fill<{vip},{w},{str(o).lower()}>" for w in (4, 8) for o in (False, True)},
        },
        "rowwise_gpu/long_rows.cu": {
            "mark": f"long_mark<{ip}>",
            "rank": "long_rank",
            "columns": f"long_columns<{vip}>",
            "fill": f"long_fill<{vip}>",
        },
    }


def _sort_names(ip: str, vip: str) -> dict[str, str]:
    """Return our names and the name expressions of the kernels of sorted rows, by class, with 32-bit keys."""
    names: dict[str, str] = {}
    for n, s in enumerate(SORT_CLASSES):
        hashed = f"{ip},{s.group},{_power_of_two(s.max_products)},{s.warps}"
        sorts = f"{vip},u32,{s.group},{s.items},{s.warps}"
        names |= {f"count {n}": f"count_rows<{hashed}>", f"fill {n}": f"sort_rows<{sorts},false>"}
        if n in SINGLE_PASS_CLASSES:
            names |= {f"sample {n}": f"sample_rows<{hashed}>", f"single pass {n}": f"sort_rows<{sorts},true>"}
    return names


def _power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(eq=False)
class ProductFacts:
    """What kernels find out about a product, in device memory, and its copy in page-locked host memory."""

    device: Any  # (FACTS + n,) uint64: the facts, then the state of the scan
    # (FACTS,) uint64: as of the last `read`, or as a kernel has left it; the next product on this thread overwrites it
    host: Any
    host_base: int  # address of `host`; kernels can write there
    stream: Any
    kernels: RowKernels
    base: int = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.device.data.ptr

    def at(self, slot: int) -> int:
        """Return the device address of a fact."""
        return self.base + 8 * slot

    def on_host(self, slot: int) -> int:
        """Return the address of a fact on the host."""
        return self.host_base + 8 * slot

    def read(self) -> None:
        """Wait for the device and copy its facts."""
        self.kernels.launch("rowwise_gpu/rows.cu", "publish", 1, FACTS, (self.base, self.host_base))
        self.stream.synchronize()

    def wait(self) -> None:
        """Wait for the device; for use if a kernel writes the facts to be read next to the host."""
        self.stream.synchronize()

    def __getitem__(self, slot: int) -> int:
        return int(self.host[slot])

    def class_rows(self) -> list[int]:
        """Return the rows of each class, the rows without products first."""
        counts: list[int] = self.host[COUNTS : COUNTS + ROW_CLASSES].tolist()
        return counts
