"""Installs faults in a fresh process: this folder is on its PYTHONPATH."""

import os
import sys

if "SPDIST_TORTURE" in os.environ:
    sys.path.insert(0, os.environ["SPDIST_TORTURE_ROOT"])
    from tests.torture import inject

    sys.path.pop(0)
    if role := inject.role_of(sys.orig_argv):
        inject.mark_points()
        inject.install(os.environ["SPDIST_TORTURE"], role)
