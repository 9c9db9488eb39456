"""A B that is read by several processes together: pieces, locks, files that go, errors."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist import api
from spdist.csr import check_canonical
from spdist.errors import CorruptError, MatrixError, MemoryBoundError
from spdist.scheduler import shared, sizes, stages
from spdist.scheduler.shared import Resident
from spdist.storage import StoredMatrix
from tests.conftest import assert_is_product, random_matrix
from tests.test_engine_cuda import read


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Cut pieces of a few entries."""
    monkeypatch.setattr(shared, "PIECE", 1 << 10)


@pytest.fixture
def b(tmp_path, monkeypatch):
    """Return a matrix of dozens of pieces."""
    return in_chunks(tmp_path / "B.zarr", random_matrix(900, 700, 9, 1), 100)


def in_chunks(place: Path, m: sp.csr_matrix, length: int) -> StoredMatrix:
    """Store a matrix in short Zarr chunks, as it is."""
    from spdist.storage import MatrixWriter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spdist.storage.CHUNK_LENGTH", length)
        writer = MatrixWriter(str(place), m.shape[1], m.dtype, {})
        writer.append(spdist.csr.CSR(m.indptr.astype(np.int64), m.indices.astype(np.int32), m.data, m.shape))
        writer.close()
    return api.open_matrix(place)
