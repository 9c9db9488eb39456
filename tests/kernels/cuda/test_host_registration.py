"""Operands that are page-locked where they lie, with a driver that is told of."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

from spdist.kernels.cuda import host_registration
from spdist.kernels.cuda.host_registration import RegistrationTuning

SIZE = 1 << 16
TUNING = RegistrationTuning(least_bytes=SIZE, trial_bytes=SIZE // 4, least_rate=SIZE // 4 / 0.2)


def note(arrays: list[np.ndarray]) -> None:
    host_registration.note_operands(arrays, TUNING)


class Driver:
    """Knows what is locked; refuses what overlaps that."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.seconds = 0.0
        self.refuses = False
        self.after: Callable[[], None] = lambda: None

    def register(self, address: int, size: int) -> bool:
        self.calls += 1
        time.sleep(self.seconds)
        self.after()
        overlaps = any(first < address + size and address < first + length for first, length in self.locked.items())
        assert not overlaps
        if not self.refuses:
            self.locked[address] = size
        return not self.refuses

    def unregister(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(host_registration, "_register", found.register)
    monkeypatch.setattr(host_registration, "_unregister", found.unregister)
    return found


def test_an_array_is_locked_by_the_second_product_until_it_dies(driver):
    a, b = np.ones(SIZE), np.ones(SIZE)
    note([a, b])
    assert not driver.locked
    note([a, a])
    assert driver.locked == {a.ctypes.data: a.nbytes}
    note([a])
    assert driver.calls == 2  # a part, to see how long it takes, and all
    del a
    gc.collect()
    assert not driver.locked
    note([b])
    assert driver.locked == {b.ctypes.data: b.nbytes}


def test_of_views_the_whole_is_locked_while_any_of_it_lives(driver):
    whole = np.ones(SIZE)
    first, last = whole[:100], whole[-100:].view(np.uint8)
    expected = {whole.ctypes.data: whole.nbytes}
    note([first, last])  # one product
    assert not driver.locked
    del whole, first
    note([last])
    assert driver.locked == expected
    del last
    gc.collect()
    assert not driver.locked


def test_another_array_at_the_same_address_is_another(driver):
    for _ in range(3):
        a = np.ones(SIZE)
        note([a])
        del a
        gc.collect()
    assert not driver.locked
    assert not host_registration._owned


@pytest.mark.parametrize("array", [np.ones(SIZE // 8 - 1), np.frombuffer(bytearray(8 * SIZE), np.float64)])
def test_small_arrays_and_memory_of_others_are_left_alone(driver, array):
    for _ in range(3):
        note([array])
    assert driver.calls == 0


@pytest.mark.parametrize("fault", ["slow", "refuses"])
def test_memory_that_is_slow_to_lock_is_copied(driver, fault):
    driver.seconds, driver.refuses = 0.3 * (fault == "slow"), fault == "refuses"
    a = np.ones(SIZE)
    for _ in range(4):
        note([a])
    assert not driver.locked
    assert driver.calls == TUNING.trials
    del a
    gc.collect()


def test_a_thread_that_is_kept_from_locking_tries_again(driver):
    driver.seconds, a = 0.3, np.ones(SIZE)
    driver.after = lambda: setattr(driver, "seconds", 0)
    note([a])
    note([a])
    assert driver.locked == {a.ctypes.data: a.nbytes}
    assert driver.calls == 3
