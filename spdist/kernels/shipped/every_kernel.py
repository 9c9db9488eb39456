"""Every kernel that may be launched, by .cu file; a family that gets a kernel lists it here."""

from __future__ import annotations

from spdist.kernels.batch_gpu import multiply as batch_gpu
from spdist.kernels.bsr import multiply_gpu as bsr
from spdist.kernels.dense import nearest_gpu as dense
from spdist.kernels.esc import multiply as esc
from spdist.kernels.esc.long_rows import FILE as ESC_LONG_FILE
from spdist.kernels.esc.long_rows import long_row_kernels
from spdist.kernels.esc.product import COUNT_FILE, LIST_FILE, LIST_KERNELS, count_kernels
from spdist.kernels.esc.row_classes import ESC_CLASSES
from spdist.kernels.hyspmm.sort_groups import KernelNames
from spdist.kernels.rowwise_gpu import epilogue, masked
from spdist.kernels.rowwise_gpu.finished import inflate
from spdist.kernels.rowwise_gpu.row_kernels import RowKernels
from spdist.kernels.spmv import columns, csr, ehyb, reorder, vector_updates
from spdist.kernels.spmv.sell import build_gpu, multiply_gpu
from spdist.kernels.spmv.sell.format import BLOCKS
from spdist.kernels.streaming import packing

Names = list[tuple[str, tuple[str, ...]]]
"""Paths of .cu files from the kernels' folder, and name expressions in them."""
VECTORS = {"float": ("float", "double"), "Complex<float>": ("Complex<float>", "Complex<double>")}
"""C types that x and y may have, by the C type of stored values that may be narrower."""
BYTES = {"float": 4, "double": 8, "Complex<float>": 8, "Complex<double>": 16}
"""Bytes of a number of x, by its C type."""
BLOCK_SIDES = (2, 3, 4, 6, 8, 16)
"""Sides of dense blocks that are compiled."""


def kernels_by_file(value: str, index: str, pointer: str) -> dict[str, set[str]]:
    """Return all name expressions for C types of values, columns and offsets, such as ``"double", "int", "int"``."""
    kernels: dict[str, set[str]] = {}
    for family in (_rowwise, _bsr, _dense, _esc, _hyspmm, _spmv):
        for file, names in family(value, index, pointer):
            kernels.setdefault(file, set()).update(names)
    return kernels


def _rowwise(value: str, index: str, pointer: str) -> Names:
    narrow = RowKernels(value, index, pointer)
    inflates = () if value.startswith("Complex") else (inflate.kernel_name(value, pointer),)
    return [
        *narrow.name_expressions().items(),
        *(narrow.with_wide_keys().name_expressions().items() if index != "int" else ()),
        (epilogue.FILE, tuple(epilogue.kernel_names(value, index, pointer).values())),
        (masked.FILE, tuple(masked.kernel_names(value, index, pointer).values())),
        (inflate.FILE, inflates),
        (batch_gpu.FILE, batch_gpu.kernel_names(value, index, pointer)),
        (packing.FILE, packing.kernel_names(value, index, pointer)),
    ]


def _bsr(value: str, index: str, pointer: str) -> Names:
    sides = *BLOCK_SIDES, bsr.LONGEST_SIDE + 1
    methods = {bsr.method_of(value, (side, side, side), True, tf32) for side in sides for tf32 in (False, True)}
    whole = (side for side in BLOCK_SIDES if side <= bsr.ROW_SIDE)
    return [
        *((bsr.FILE, bsr.kernels(value, index, pointer, method)) for method in methods),
        (bsr.FILE, tuple(bsr.row_kernel(value, index, pointer, (side, side, side), 32) for side in whole)),
    ]


def _dense(value: str, index: str, pointer: str) -> Names:
    return [(dense.FILE, dense.kernel_names(value))] if value in ("float", "double") else []


def _esc(value: str, index: str, pointer: str) -> Names:
    types, keys = (value, index, pointer), ("u32", "u64")
    return [
        (esc.FILE, (esc.copy_kernel(value, index),)),
        (esc.FILE, tuple(esc.row_kernel(types, key, row_class) for key in keys for row_class in ESC_CLASSES)),
        *((ESC_LONG_FILE, long_row_kernels(types, (key, key), ESC_CLASSES[-1], ESC_CLASSES[-2])) for key in keys),
        (ESC_LONG_FILE, long_row_kernels(types, ("u64", "u64"), *ESC_CLASSES[-2:-4:-1])),  # less shared memory
        (COUNT_FILE, count_kernels(index, pointer)),
        (LIST_FILE, LIST_KERNELS),
    ]


def _hyspmm(value: str, index: str, pointer: str) -> Names:
    keys = ("u32", "u64") if index == "int" else ("u64",)
    return [item for key in keys for item in KernelNames(value, index, pointer, key).by_file.items()]


def _spmv(value: str, index: str, pointer: str) -> Names:
    vectors, sides, many = VECTORS.get(value, (value,)), (1, *BLOCKS), multiply_gpu.COLUMNS
    ip, vvip = f"{index}, {pointer}", f"{value}, {value}, {index}, {pointer}"
    counts = [*((k, False) for k in many), (1, True)]
    return [
        (csr.FILE, tuple(csr.kernel_name(value, x, index, pointer, width) for x in vectors for width in csr.WIDTHS)),
        (columns.FILE, tuple(
            columns.multiply_name(value, x, index, pointer, shape)
            for x in vectors for shape in sorted(columns.shapes(BYTES[x]))
        )),
        (columns.FILE, tuple(f"columns_add<{x}>" for x in vectors)),
        (ehyb.FILE, (f"ehyb_count<{ip}>", f"ehyb_fill<{vvip}>")),
        (ehyb.FILE, tuple(ehyb.multiply_name(value, x, alone) for x in vectors for alone in (True, False))),
        (reorder.FILE, (*reorder.level_names(index, pointer), f"reorder_rows<{value}, {ip}>")),
        (build_gpu.FILE, (*build_gpu.placing(index, pointer), f"sell_copy<{value}, {value}, {index}>")),
        (build_gpu.FILE, tuple(f"sell_analyse<{ip}, {b}>" for b in sides)),
        (build_gpu.FILE, tuple(f"sell_fill<{vvip}, {b}>" for b in sides)),
        (multiply_gpu.FILE, tuple(
            multiply_gpu.multiply_name(value, x, b, *count) for x in vectors for b in sides for count in counts
        )),
        (multiply_gpu.FILE, tuple(f"sell_long_rows<{x}, {k}>" for x in vectors for k in many)),
        (multiply_gpu.FILE, tuple(f"sell_gather<{x}>" for x in vectors)),
        (vector_updates.FILE, vector_updates.kernel_names(value)),
    ]  # fmt: skip
