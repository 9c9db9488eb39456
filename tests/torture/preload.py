"""Imported by the fork servers: everything that commands and workers need, with points in it."""

import gc
import importlib
from contextlib import suppress

from tests.torture import inject, server

inject.mark_points()
for name in server.MODULES:
    with suppress(ImportError):
        importlib.import_module(name)
server.prepare_worker()
with suppress(Exception):  # Numba's kernels are loaded once for all; this starts no thread
    server.load_kernels()
gc.collect()
gc.freeze()
