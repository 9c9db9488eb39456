"""A signal that comes while an object is being finalized still ends the process."""

from __future__ import annotations

import subprocess
import sys

from tests.support.worker_processes import ROOT

DYING = """
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
"""
BODY = """
import os, signal, sys, time
{before}
{dying}
try:
    Dying()
    time.sleep({seconds})
    print("slept")
except KeyboardInterrupt:
    print("interrupted")
"""
INSTALL = "from spdist.cli.interrupts import raise_dropped_interrupts; raise_dropped_interrupts()"


def output(before: str, seconds: float) -> tuple[str, str]:
    code = BODY.format(before=before, dying=DYING, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    return done.stdout, done.stderr


def test_a_dropped_interrupt_is_raised_again():
    assert output(INSTALL, 30.0) == ("interrupted\n", "")


def test_python_drops_it_otherwise():
    out, errors = output("", 0.2)
    assert out == "slept\n"
    assert "KeyboardInterrupt" in errors


def test_what_was_half_made_is_silent_once_the_process_stops():
    code = """
import contextlib, sys
from spdist.cli import interrupts

class HalfMade:
    def __del__(self):
        raise AttributeError(f"has no part {len(sys.argv)}")

interrupts.raise_dropped_interrupts()
HalfMade()
with contextlib.suppress(KeyboardInterrupt):
    interrupts.say_that_it_stops(2, None)
HalfMade()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("has no part") == 1
    assert "stopping" not in done.stderr  # it is no terminal
