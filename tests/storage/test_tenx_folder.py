"""Folders of 10x Genomics: AnnData's own reading, transposed by hand, is the oracle."""

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError, SpdistError
from spdist.storage.formats import tenx_folder
from spdist.storage.import_export import import_matrix

GENES, CELLS = 5, 3
IDS = [f"ENSG{i:04}" for i in range(GENES)]
SYMBOLS = ["MT-CO1", "HLA-A", "TP53", "TP53", ""]
BARCODES = ["AAAC-1", "AAAG-1", "AATT-1"]


def counts() -> sp.coo_array:
    return sp.coo_array(np.arange(GENES * CELLS).reshape(GENES, CELLS) % 4)


def write_folder(
    folder: Path, ending: str = ".gz", genes: str = "features.tsv", kinds: int = 1, fields: int = 3
) -> Path:
    """Write a folder as Cell Ranger does."""
    folder.mkdir(exist_ok=True)
    matrix = io.BytesIO()
    scipy.io.mmwrite(matrix, counts(), comment='metadata_json: {"software_version": "x"}', field="integer")
    types = ["Gene Expression", "Antibody Capture"]
    lines = ["\t".join((IDS[i], SYMBOLS[i], types[i % kinds])[:fields]) for i in range(GENES)]
    texts = {"matrix.mtx": matrix.getvalue().decode(), "barcodes.tsv": "".join(f"{each}\n" for each in BARCODES)}
    for name, text in (texts | {genes: "".join(f"{line}\n" for line in lines)}).items():
        raw = gzip.compress(text.encode()) if ending else text.encode()
        (folder / f"{name}{ending}").write_bytes(raw)
    return folder


@pytest.mark.parametrize(("ending", "genes", "fields"), [(".gz", "features.tsv", 3), ("", "genes.tsv", 2)])
def test_cells_are_rows(tmp_path, ending, genes, fields):
    """Of Cell Ranger 3, and of Cell Ranger 2, which compresses nothing and calls the file genes.tsv."""
    got = import_matrix(write_folder(tmp_path / "x", ending, genes, 1, fields), tmp_path / "a.zarr")
    np.testing.assert_array_equal(got.rows(0, CELLS).to_scipy().toarray(), counts().toarray().T)
    assert got.dtype == np.int64
    assert got.names.rows.to_array().tolist() == BARCODES
    assert got.names.columns.to_array().tolist() == [*SYMBOLS[:4], IDS[4]]  # the identifier, where there is no symbol
    line = got.facts["provenance"]["read"]
    assert f"cells x genes: 3 barcodes are rows, 5 genes of {genes}{ending} columns" in line
    assert "coordinate integer general" in line
    assert "left out: identifiers of genes" in line


def test_genes_are_rows_if_asked(tmp_path):
    folder = write_folder(tmp_path / "x", kinds=2)
    got = import_matrix(f"{folder}/", tmp_path / "a.zarr", orient="genes-by-cells")
    np.testing.assert_array_equal(got.rows(0, GENES).to_scipy().toarray(), counts().toarray())
    assert got.names.columns.to_array().tolist() == BARCODES
    line = got.facts["provenance"]["read"]
    assert "genes x cells: 5 genes of features.tsv.gz are rows, 3 barcodes columns" in line
    assert "features of types Gene Expression, Antibody Capture" in line


def test_identifiers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tenx_folder, "PIECE_NAMES", 2)
    got = import_matrix(write_folder(tmp_path / "x", fields=1), tmp_path / "a.zarr", orient="cells-by-genes")
    assert got.names.columns.to_array().tolist() == IDS
    assert "left out" not in got.facts["provenance"]["read"]


def test_the_matrix_alone(tmp_path):
    """A path of a .mtx is a .mtx, whatever lies beside it."""
    folder = write_folder(tmp_path / "x")
    (folder / "matrix.mtx.gz").rename(folder / "GSM1_matrix.mtx.gz")
    got = import_matrix(folder / "GSM1_matrix.mtx.gz", tmp_path / "a.zarr")
    assert got.shape == (GENES, CELLS)
    assert got.names == (None, None)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("barcodes.tsv", "a\nb\n", r"barcodes.tsv: 2 names where 3 are needed"),
        ("barcodes.tsv", "barcode\na\nb\nc\n", r"barcodes.tsv: 4 names where 3 are needed"),
        ("features.tsv", "a\n\nb\n", r"features.tsv: 2 names where 5 are needed"),
        ("features.tsv", "a" * (1 << 16), r"features.tsv, line 1: longer than 65,536 bytes"),
        ("features.tsv", None, r"no features.tsv or genes.tsv, compressed or not, beside .*matrix.mtx"),
        ("barcodes.tsv", None, r"no barcodes.tsv, compressed or not, beside"),
        ("matrix.mtx", "%%MatrixMarket matrix coordinate integer general\n5 3 1\n6 1 1\n", r"line 3: row 6"),
        ("matrix.mtx", "hello", r"matrix.mtx, line 1: not a Matrix Market file"),
        ("matrix.mtx", None, r"x is a folder and not Zarr or a folder of 10x Genomics \(which has matrix.mtx"),
    ],
)  # fmt: skip
def test_folders_that_are_wrong(tmp_path, name, text, what):
    folder = write_folder(tmp_path / "x", ending="")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(SpdistError, match=what) as caught:
        import_matrix(folder, tmp_path / "a.zarr")
    assert isinstance(caught.value, InputError if text is None else MatrixError)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_quotes_of_r_are_no_part_of_names(tmp_path):
    folder = write_folder(tmp_path / "x", "", "genes.tsv")
    (folder / "barcodes.tsv").write_text("".join(f'"{each}"\r\n' for each in BARCODES))
    assert import_matrix(folder, tmp_path / "a.zarr").names.rows.to_array().tolist() == BARCODES


def test_a_truncated_file_of_names(tmp_path):
    folder = write_folder(tmp_path / "x")
    whole = (folder / "barcodes.tsv.gz").read_bytes()
    (folder / "barcodes.tsv.gz").write_bytes(whole[:-9])
    with pytest.raises(MatrixError, match=r"barcodes.tsv.gz is damaged|barcodes.tsv.gz: .*damaged"):
        import_matrix(folder, tmp_path / "a.zarr")
