"""Matrices in HDF5 and MATLAB files, read by a process of its own: damaged files crash, hang or blow up the libraries.

`reader` is the side of spdist. Everything else runs in the child: `process` finds the module that knows the file.
"""
