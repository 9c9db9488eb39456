"""Supervise the workers of a run: compare them before work starts, survive lost ones, report what a run waits for."""
