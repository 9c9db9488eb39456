"""MATLAB's files before version 7.3, by SciPy, which reads a variable whole: into the memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO, cast

import numpy as np
import scipy.io
import scipy.sparse as sp

from spdist.storage.formats.hdf5.description import Array, Description, Kind, RefusedError, Settings, listed
from spdist.storage.formats.hdf5.matlab import FORMAT, NUMERIC, choose, fields_left_out

Variables = dict[str, tuple[str, tuple[int, ...]]]
"""Classes and shapes of variables."""


def describe(raw: BinaryIO, settings: Settings) -> Description:
    """Return what describes a sparse matrix, or a dense one, of a file."""
    variables: Variables = {name: (kind, shape) for name, shape, kind in scipy.io.whosmat(cast(Any, raw))}
    name, *fields = settings.inner.replace("/", ".").split(".")
    left_out: list[str] = []
    if not name and variables.get("Problem", ("",))[0] == "struct":
        name, fields = "Problem", ["A"]
    elif not name:
        name = _choose(raw, variables)
        left_out = [f"variable {other}" for other in variables if other != name]
    if name not in variables:
        raise RefusedError(f"there is no variable '{name}'; there is {_spelled(variables)}")
    value, beside = _load(raw, name, fields)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":  # as bytes, though its class may be double
        value, _ = _load(raw, name, fields, mat_dtype=True)  # which would drop imaginary parts
    found = _described(".".join([name, *fields]), value, variables[name][0] == "logical")
    found.left_out = fields_left_out(beside) if (name, *fields) == ("Problem", "A") else left_out
    others = [each for each, (kind, _) in variables.items() if kind == "sparse"]
    found.sparse = listed(others) if found.kind == "dense" and not settings.dense else ""
    return found


def _choose(raw: BinaryIO, variables: Variables) -> str:
    """Return the variable to read; whether one of class logical is sparse is known once it is read."""
    logical = {name: sp.issparse(_load(raw, name)[0]) for name, (kind, _) in variables.items() if kind == "logical"}
    sparse = [name for name, (kind, _) in variables.items() if kind == "sparse" or logical.get(name)]
    dense = [
        name
        for name, (kind, shape) in variables.items()
        if kind in NUMERIC and len(shape) == 2 and name not in sparse and not name.startswith("__")
    ]
    return choose(sparse, dense, [_spelled(variables)] if variables else [])


def _spelled(variables: Variables) -> str:
    return listed(f"{name} ({kind} {' x '.join(map(str, shape))})" for name, (kind, shape) in variables.items())


def _load(raw: BinaryIO, name: str, fields: Sequence[str] = (), mat_dtype: bool = False) -> tuple[Any, list[str]]:
    """Return a variable, or a field of a struct, and the names of the fields of the innermost struct."""
    raw.seek(0)
    value: Any = scipy.io.loadmat(cast(Any, raw), variable_names=[name], mat_dtype=mat_dtype).get(name)
    names: list[str] = []
    for field in fields:
        names = list(value.dtype.names or ()) if isinstance(value, np.ndarray) else []
        if names and value.size != 1:
            raise RefusedError(f"'{name}' has {value.size:,} structs, of which none can be named; save one by itself")
        if field not in names:
            raise RefusedError(f"'{name}' is no struct with a field '{field}'; its fields: {listed(names)}")
        value = value[field].flat[0]
    return value, names


def _described(inner: str, value: Any, is_logical: bool) -> Description:
    """Return what describes a value that SciPy read."""
    format = value.format if sp.issparse(value) else ""  # type: ignore[attr-defined]
    if format in ("csc", "coo"):
        columns = {"indptr": "indptr", "indices": "indices"}
        fields = columns if format == "csc" else {"rows": "row", "columns": "col"}
        arrays = {ours: _held(getattr(value, theirs)) for ours, theirs in fields.items()}
        arrays["data"] = _held(_as_matlab(value.data, is_logical))
        kind: Kind = "columns" if format == "csc" else "coordinates"
        return Description(FORMAT, inner, kind, list(map(int, value.shape)), arrays)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim == 2:
        return Description(FORMAT, inner, "dense", list(value.shape), {"values": _held(value)})
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
    raise RefusedError(f"{inner} is no matrix of numbers but {type(value).__name__}{shape}")


def _as_matlab(data: Any, is_logical: bool) -> Any:
    """Return values in MATLAB's dtype: a sparse matrix holds doubles, though the file may store them as bytes."""
    if is_logical or data.dtype.kind == "b":
        return data != 0
    is_double = data.dtype.kind == "f" or (data.dtype.kind in "iu" and data.dtype.itemsize < 8)
    return data.astype(np.float64, copy=False) if is_double else data


def _held(values: Any) -> Array:
    return Array(values.shape, values.dtype, lambda at: values[at], (1,) * values.ndim)
