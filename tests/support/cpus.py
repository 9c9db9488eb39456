"""Another number of CPUs than this machine has."""

from __future__ import annotations

import os

import pytest

from spdist.foundation import cpus


def pretend_cpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this process be bound to so many CPUs, and have no quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)), raising=False)
    monkeypatch.setattr(cpus, "cpu_quota", lambda system: float("inf"))
