"""Mutation: plant one small mistake at a time and look whether a related test fails.

::

    make mutate COUNT=300 SEED=7 JOBS=2 BUDGET=28800      # a night; without SEED another one each time
    python -m tests.mutation --path spdist/storage --count 20
    python -m tests.mutation --seed 7 --only 12           # one mutant again

Each job has a copy of the working tree. A mutant changes one token or statement of one file there (`mutants.py`). The
tests that import the file run first, then the tests of its folder, then the tests that reach it through other modules,
until one fails or the mutant's time is up (`trials.py`). A test that kills a mutant must pass without it: otherwise it
is left out, and the mutant is tried again.

Packages for mutation testing were tried and do not fit: mutmut replaces functions by dispatchers, which Numba cannot
compile and worker processes do not see; cosmic-ray runs one command for all mutants and takes no sample.

A mutant that survives is one of three things: a missing test, a line that is not needed, or a change that nobody can
observe (speed, a message's wording). The first gets a test, the second goes.
"""
