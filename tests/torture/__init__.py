"""Torture: break what can break while spdist runs, and look whether C is right and what was said.

::

    make torture COUNT=1000 SEED=7                        # hours; without SEED another one each time
    python -m tests.torture --part kills --count 50       # one part
    python -m tests.torture --part kills --seed 7 --only 12   # one trial again; a bad one says how
    python -m tests.torture --jobs 8 --budget 540     # trials side by side, until time is up

``make test`` runs a minute of it with a fixed seed (`test_torture.py`); ``benchmarks/faults.py`` writes the record.

Trials use the command line alone, in real processes. They know no internals of spdist, so that they need no change when
those change:

- **Points.** An import hook puts a mark at the start and the end of every function of spdist, outside its kernels
  (`inject.py`). A run that nobody disturbs lists the points that it passes. A trial picks one and kills there.
- **System calls.** `faults.c` stands before the C library, counts opens, writes, renames, messages and allocations,
  and lets the n-th fail, be short, or be the last. It also notes which files were synchronised: power loss takes the
  others.
- **Speed.** A fresh command needs two seconds to start. `server.py` has everything loaded and forks itself for each
  command, and for each worker. Two of a hundred trials use fresh processes.

========== ======================================================================================================
part       what happens
========== ======================================================================================================
kills      client, worker or all killed, or the client interrupted, at a moment or a point; sometimes again in resume
cluster    scheduler, nannies or all killed of a cluster that was started by hand
tasks      applications, conversions and chains killed at a moment or at a call that changes files; run again
ends       the same, before the last such call of each, the one before it, and so on
damage     a file of A, B, the mask, an unfinished or a finished C flipped, cut, swapped, copied, zeroed, deleted
pairs      two commands on one target
calls      a system call or an allocation fails, in client or worker
settings   hostile variables and files of settings for numba, dask, zarr, fsspec, Python and the shell
power      a kill, and files that were not synchronised lose what they hold
memory     the n-th allocation of more than a MiB fails, or all from then on
rewrites   A, B or the mask rewritten while a product reads it, at a moment or when one of its files is opened
network    a connection is reset, ends in a message, waits, or says nothing more (TCP proxies between processes)
skewed     nothing but a skewed matrix: peak memory against the limit, as reported and from outside
histories  random sequences of all this against a model (hypothesis)
========== ======================================================================================================

`outcome.py` has the verdicts. Two are good: **right** (every byte of C is that of an undisturbed run, and no file,
process or shared memory is left) and **refused** (one line, exit code 1 or 2, which names what is wrong; what lay at
the target is as it was, and the way out that the line names leads to the product).

Device memory and page-locked memory are not made to fail here: that needs a GPU. Nothing undoes a rename that was not
synchronised; power loss takes contents only.
"""
