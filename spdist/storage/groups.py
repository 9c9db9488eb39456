"""Zarr groups: created unfinished, finished in one step; their attributes, and small files of spdist's own."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from spdist.errors import CorruptError, InputError, MatrixError, SpdistError, one_line
from spdist.foundation.units import format_bytes
from spdist.matrices.dtypes import ValueArray
from spdist.shown import as_cause, without_secrets
from spdist.storage.checksums import Table, digest_of, write_table
from spdist.storage.chunked_array import CHUNK_LENGTH, ChunkedArray, compresses, from_document, from_zarr, new_array
from spdist.storage.direct.chunks import codec_of, group_document
from spdist.storage.lock import readable_url
from spdist.stores.location import Location
from spdist.stores.names import METADATA, unreadable
from spdist.stores.registry import at, normalise

if TYPE_CHECKING:
    import zarr

ARRAYS = ("indptr", "indices", "data")
"""Names of the arrays of a matrix."""

SEAL_VERSION = 1
"""Version of the seal, the digests of metadata and of tables of checksums in the attribute ``spdist``."""

METADATA_FILES = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")
"""Names of the files in which Zarr keeps metadata, of version 3 and 2."""

PART_NAME = re.compile(r"\d+-of-\d+")
"""Names of the folders in which the parts of a matrix lie."""

Member: TypeAlias = "zarr.Array[Any] | dict[str, Any]"
"""An array of a group: Zarr's, or its document if it is as spdist writes it."""

METADATA_BYTES = 16 << 20
"""Bytes of the longest metadata file that is read: parsed JSON takes twenty times as much memory."""


@contextmanager
def clear_zarr_errors(url: str, name: str = "") -> Iterator[None]:
    """Turn every error that Zarr raises on damaged metadata into one line that names the file.

    Wrap only calls of Zarr, so that a mistake in spdist is not reported as a damaged file.

    `name`: the array whose metadata are read; empty for the metadata of the group.
    Raises `MatrixError` in place of every error but spdist's own.
    """
    try:
        yield
    except SpdistError:
        raise
    except PermissionError as error:
        raise unreadable(url) from error
    except Exception as error:  # Zarr raises nearly every type on bad JSON, wrong types and missing keys
        file = "/".join(filter(None, (url, name, "zarr.json")))
        raise MatrixError(
            f"{file}: Zarr metadata that cannot be read ({type(error).__name__}: {one_line(error)}); restore it from a "
            f"copy or write the matrix again"
        ) from as_cause(error)


def check_metadata_files(location: Location, names: tuple[str, ...] = ARRAYS) -> None:
    """Refuse local metadata files that would block a reader or fill its memory: pipes, devices, gigabytes of JSON."""
    for key in (f"{name}/{file}".lstrip("/") for name in ("", *names) for file in METADATA_FILES):
        path = f"{location}/{key}"
        try:
            found = location.stat(key)
        except OSError as error:
            raise MatrixError(f"{path}: cannot be read ({error.strerror}); restore it from a copy") from error
        if found is None:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise MatrixError(f"{path}: is no ordinary file; restore it from a copy")
        if found.st_size > METADATA_BYTES:
            size = f"{format_bytes(found.st_size)}, more than {format_bytes(METADATA_BYTES)}"
            raise MatrixError(f"{path}: Zarr metadata of {size}; restore it from a copy or write the matrix again")


def begin(url: str, facts: dict[str, Any]) -> None:
    """Create an unfinished group; a run that is killed leaves the whole group or nothing.

    `facts`: stored in the attribute ``spdist``, with the state ``unfinished``.
    """
    attributes = {"spdist": {**facts, **_provenance(facts), "state": "unfinished"}}
    if not at(url).create_with(METADATA, _as_json(group_document(attributes))):
        import zarr

        zarr.create_group(at(url).zarr_store(), attributes=attributes)


def read_facts(url: str) -> dict[str, Any]:
    """Return the attribute ``spdist`` of the group at `url`; an empty dictionary if it is missing.

    Raises `MatrixError` if the system denies reading the group.
    """
    return facts_of(read_attributes(url))


def read_attributes(url: str) -> dict[str, Any]:
    """Return the attributes of the group at `url` without checking them; an empty dictionary if there is no group.

    Raises `MatrixError` if the system denies reading the group.
    """
    location = at(url)
    try:
        if not location.exists():
            return {}
        check_metadata_files(location, ())
        if (attributes := _attributes_of_file(location)) is not None:
            return attributes
        import zarr

        return zarr.open_group(location.zarr_store(), mode="r", use_consolidated=False).attrs.asdict()
    except PermissionError as error:
        raise unreadable(url) from error
    except Exception as error:  # Zarr cannot read anything there
        if isinstance(error, InputError) and not isinstance(error, MatrixError):
            raise  # the storage does not answer
        return {}


def _attributes_of_file(location: Location) -> dict[str, Any] | None:
    """Return the attributes of a local group of version 3; None if Zarr is to say what is there."""
    try:
        document = json.loads(location.read_without_zarr(METADATA) or b"")
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("zarr_format") != 3 or document.get("node_type") != "group":
        return None
    attributes = document.get("attributes")
    return attributes if isinstance(attributes, dict) else None


def read(location: Location) -> tuple[dict[str, Any], dict[str, Member]]:
    """Return the attributes of the group at `location`, and its arrays named in `ARRAYS`.

    The arrays of a sealed local group, written as spdist writes, are documents: Zarr is not loaded for them.

    Raises `MatrixError` if there is no group, the system denies reading it, or its metadata are damaged.
    Raises `CorruptError` if metadata were changed since spdist wrote them; names the file.
    """
    _check_is_there(location)
    with clear_zarr_errors(location.url):
        attributes = _attributes_of_file(location)
    if attributes is not None and facts_of(attributes).get("seal") is not None:
        check_seal(location, attributes)
        sealed = [name for name in ARRAYS if name in facts_of(attributes)["seal"]["arrays"]]
        documents = {name: json.loads(location.read(f"{name}/zarr.json")) for name in sealed}
        if all(codec_of(json.dumps(document)) for document in documents.values()):
            return attributes, documents
    return _read_by_zarr(location)


def _read_by_zarr(location: Location) -> tuple[dict[str, Any], dict[str, Member]]:
    """Read a group as `read`, by Zarr."""
    import zarr

    group = _open_group(location)
    with clear_zarr_errors(location.url):
        attributes = group.attrs.asdict()
    check_seal(location, attributes)
    members: dict[str, Member] = {}
    for name in ARRAYS:
        with clear_zarr_errors(location.url, name):
            if isinstance(member := group.get(name), zarr.Array):
                members[name] = member
    return attributes, members


def array_of(url: str, name: str, member: Member, size: tuple[int, ...], table: str) -> ChunkedArray:
    """Return an array that `read` found; parameters as for `from_zarr`."""
    if isinstance(member, dict):
        return from_document(url, name, member, size, table)
    return from_zarr(url, name, member, size, table)


def _check_is_there(location: Location) -> None:
    """Raise if nothing is at the location, or its metadata is not a regular file."""
    with clear_zarr_errors(location.url):
        if not location.exists():
            raise MatrixError(f"{location}: there is no such matrix")
        check_metadata_files(location)


def _open_group(location: Location) -> zarr.Group:
    """Return the group at `location`; raise MatrixError if it is missing, or its metadata are damaged."""
    import zarr
    from zarr.errors import ContainsArrayError, GroupNotFoundError

    store = location.zarr_store()
    with clear_zarr_errors(location.url):
        try:
            return zarr.open_group(store, mode="r", use_consolidated=False)
        except (GroupNotFoundError, ContainsArrayError, FileNotFoundError, NotADirectoryError) as error:
            if is_array(location):
                raise MatrixError(
                    f"{location}: a dense array, and products read sparse matrices; `spdist import --dense {location} "
                    f"A.zarr` stores its nonzeros"
                ) from error
            if made := sorted({name for name in location.names() if PART_NAME.fullmatch(name)}):
                raise MatrixError(
                    f"{location}: an unfinished product in parts, of which {', '.join(made[:9])} are begun; "
                    f"`spdist multiply A B {location} --part K/N` makes the others"
                ) from error
            raise MatrixError(f"{location}: not a Zarr group; convert files with `spdist import`") from error


def is_array(location: Location) -> bool:
    """Whether an array of Zarr is at `location`, and no group."""
    check_metadata_files(location, ())
    with clear_zarr_errors(location.url):
        if location.has(".zarray"):
            return True
        document = json.loads(location.read("zarr.json")) if location.has("zarr.json") else None
    return isinstance(document, dict) and document.get("node_type") == "array"


def facts_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attribute ``spdist`` of a group; an empty dictionary if it is missing."""
    facts = attributes.get("spdist")
    return facts if isinstance(facts, dict) else {}


def check_seal(location: Location, attributes: dict[str, Any]) -> None:
    """Compare the metadata of a group and its arrays with the digests in its seal, if it has one.

    Raises `CorruptError` if metadata were changed since spdist wrote them; names the first such file.
    Raises `MatrixError` if a later spdist wrote the seal.
    """
    for error in broken_seals(location, attributes):
        raise error


def broken_seals(location: Location, attributes: dict[str, Any]) -> Iterator[SpdistError]:
    """Yield an error for each metadata file that was changed since spdist wrote it; `check_seal` describes them."""
    seal = facts_of(attributes).get("seal")
    if seal is None:
        return
    if not isinstance(seal, dict) or _attributes_digest(attributes) != seal.get("group"):
        if isinstance(seal, dict) and isinstance(version := seal.get("version"), int) and version > SEAL_VERSION:
            yield MatrixError(
                f"{location}: its seal has version {version}, not {SEAL_VERSION}: read it by a later spdist"
            )
            return
        yield _edited(f"{location}/zarr.json", "attributes are not")
        return
    for name, digests in seal["arrays"].items():
        path = f"{location}/{name}/zarr.json"
        try:
            document = json.loads(location.read(f"{name}/zarr.json"))
            if _document_digest(document) != digests["metadata"]:
                yield _edited(path, "metadata are not")
        except PermissionError:
            yield unreadable(path)
        except (FileNotFoundError, NotADirectoryError):
            yield CorruptError(f"{path}: is missing; restore it from a copy or write the matrix again")
        except (OSError, ValueError, RecursionError):  # of JSON nested too deep
            yield _edited(path, "metadata are not")


def _edited(path: str, what: str) -> CorruptError:
    return CorruptError(f"{path}: the {what} what spdist wrote; restore it from a copy or write the matrix again")


def table_digest(attributes: dict[str, Any], name: str) -> str:
    """Return the digest of the table of checksums of array `name`; empty if the group has no seal."""
    seal = facts_of(attributes).get("seal")
    return cast(str, seal["arrays"][name]["checksums"]) if seal else ""


def _document_digest(document: Any) -> str:
    """Return a digest of an array's metadata without attributes, which other programs may add."""
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if key != "attributes"}
    return digest_of(json.dumps(document, sort_keys=True).encode())


def _attributes_digest(attributes: dict[str, Any]) -> str:
    """Return a digest of a group's attributes, the digests of its arrays included."""
    facts = attributes["spdist"]
    seal = {key: value for key, value in facts["seal"].items() if key != "group"}
    return digest_of(json.dumps(attributes | {"spdist": facts | {"seal": seal}}, sort_keys=True).encode())


def finish_group(
    url: str,
    arrays: list[tuple[ChunkedArray, int]],
    attributes: dict[str, Any],
    tables: dict[str, Table] | None = None,
) -> None:
    """Finish a group: write metadata and checksums of its arrays, then its attributes with the seal.

    `arrays`: the arrays written, and the length of each in elements.
    `attributes`: with the attribute ``spdist``, to which the seal is added.
    `tables`: checksums of the Zarr chunks of arrays; other arrays' checksums are read from storage.
    Raises `CorruptError` if a Zarr chunk is missing.
    """
    sealed = {}
    for array, length in arrays:
        document = json.loads(array.metadata)
        document["shape"] = [length, *document["shape"][1:]]
        whole = replace(array, length=length)
        table = (tables or {}).get(array.name)
        table = whole.stored_checksums(0, whole.nchunks) if table is None else table
        sealed[array.name] = {"metadata": _document_digest(document), "checksums": write_table(url, array.name, table)}
        _put_document(url, f"{array.name}/zarr.json", document)
    seal = {"version": SEAL_VERSION, "arrays": sealed}
    facts = attributes["spdist"]
    _put_sealed(url, attributes | {"spdist": {**facts, **_provenance(facts), "seal": seal}})


def add_facts(url: str, facts: dict[str, Any]) -> None:
    """Add facts to the attribute ``spdist`` of a finished group of spdist's, and seal it again."""
    attributes = read_attributes(url)
    _put_sealed(url, attributes | {"spdist": attributes["spdist"] | facts})


def _put_sealed(url: str, attributes: dict[str, Any]) -> None:
    """Write the attributes of a group, with their digest in the seal."""
    attributes = json.loads(json.dumps(attributes))
    attributes["spdist"]["seal"]["group"] = _attributes_digest(attributes)
    _put_document(url, "zarr.json", group_document(attributes))


def _provenance(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance among some facts as it is stored."""
    return {name: without_secrets(facts[name]) for name in ("provenance",) if name in facts}


def _put_document(url: str, key: str, document: dict[str, Any]) -> None:
    """Write a file of metadata."""
    at(url).write(key, _as_json(document))


def _as_json(document: dict[str, Any]) -> bytes:
    """Return metadata as Zarr writes them."""
    return json.dumps(document, indent=2).encode()


def write_arrays(url: str | Path, arrays: dict[str, ValueArray], attributes: dict[str, Any]) -> None:
    """Write a Zarr group of NumPy arrays, for `read_arrays`.

    `url`: must not exist.
    `arrays`: stored flattened; the shapes go to the attributes.
    """
    url = normalise(url)
    begin(url, {})
    written = []
    for name, values in arrays.items():
        flat = np.ascontiguousarray(values).ravel()
        array = new_array(url, name, flat.dtype, CHUNK_LENGTH, compressed=compresses(flat))
        if len(flat):
            array.write_chunks(0, flat)
        written.append((array, len(flat)))
    shapes = {name: list(values.shape) for name, values in arrays.items()}
    finish_group(url, written, {**attributes, "spdist": {"state": "complete", "shapes": shapes}})


def read_arrays(url: str | Path) -> tuple[dict[str, ValueArray], dict[str, Any]]:
    """Return the arrays and the attributes that `write_arrays` wrote.

    Raises `MatrixError` if nothing is at `url`, or it is no Zarr group.
    Raises `CorruptError` if a Zarr chunk is missing, truncated or altered.
    """
    import zarr

    url = readable_url(normalise(url))
    location = at(url)
    attributes, _ = read(location)
    with clear_zarr_errors(url):
        shapes: dict[str, list[int]] = dict(facts_of(attributes).get("shapes", {}))
    check_metadata_files(location, tuple(shapes))
    arrays = {}
    for name, shape in shapes.items():
        with clear_zarr_errors(url, name):
            group = zarr.open_group(location.zarr_store(), mode="r", use_consolidated=False)
            array = from_zarr(url, name, cast("zarr.Array[Any]", group[name]), (), table_digest(attributes, name))
        values = np.array(array.read(0, array.length))
        with clear_zarr_errors(url):
            arrays[name] = values.reshape(shape)
    return arrays, attributes
