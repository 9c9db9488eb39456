"""The request for a stored product, and its checks that need no plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spdist.errors import InputError
from spdist.jobs.operands import transposed_copies, with_transposed_shape
from spdist.jobs.planning import check_fit, limits_of
from spdist.jobs.report import Callbacks
from spdist.jobs.target import check_apart, check_file, check_target
from spdist.kernels.engine import find_engine
from spdist.options import ExecutionOptions, OutputOptions
from spdist.storage.matrix import StoredMatrix
from spdist.storage.names.names import NO_NAMES, AxisNames
from spdist.storage.product_spec import StoredProductSpec


@dataclass(frozen=True)
class ProductRequest:
    """The request for a stored product, its matrices opened."""

    a: StoredMatrix
    b: StoredMatrix
    target: str  # where C goes, normalised
    spec: StoredProductSpec  # changes to each row of C
    execution: ExecutionOptions
    output: OutputOptions
    callbacks: Callbacks
    # whether A and B are still to be transposed
    transpose_a: bool = False
    transpose_b: bool = False
    names: AxisNames = NO_NAMES  # of the rows and columns of C, unread
    # A and B before they were transposed: the place of each, and its fingerprint if it was transposed
    origin: tuple[tuple[str, str], tuple[str, str]] | None = None

    @property
    def may_replace(self) -> bool:
        """Whether a matrix may lie at the target already."""
        return self.output.resume or self.output.overwrite

    def check_mode(self) -> None:
        """Refuse to resume and to overwrite at once."""
        if self.output.resume and self.output.overwrite:
            raise InputError("resume continues C and overwrite replaces it: choose one")

    def check_apart(self) -> None:
        """Refuse a target that is an operand or the mask, or lies in one, and a record that lies in any of them."""
        masks = [] if self.spec.mask is None else [self.spec.mask.url]
        check_apart(self.target, self.a.url, self.b.url, *masks)
        for name, file in (("record", self.output.record), ("report", self.output.report)):
            check_file(name, file, self.target, self.a.url, self.b.url, *masks)

    def check_fit(self) -> None:
        """Refuse operands that do not fit, before they are transposed, by the names and shapes they were given with."""
        a = with_transposed_shape(self.a) if self.transpose_a else self.a
        b = with_transposed_shape(self.b) if self.transpose_b else self.b
        check_fit(a, b, self.spec, self.execution)
        if not find_engine(self.execution.engine).uses_gpu:
            limits_of(self.execution)

    @contextlib.contextmanager
    def transposed(self) -> Iterator[ProductRequest]:
        """Yield the request with operands transposed as asked; remove the transposed copies afterwards."""
        if self.transpose_a or self.transpose_b:
            self.check_apart()
            check_target(self.target, overwrite=self.may_replace)  # before the copies are made
        with transposed_copies(self.target, (self.a, self.transpose_a), (self.b, self.transpose_b)) as (a, b):
            origin = self._origin(self.a, self.transpose_a), self._origin(self.b, self.transpose_b)
            yield replace(self, a=a, b=b, transpose_a=False, transpose_b=False, origin=origin)

    @staticmethod
    def _origin(m: StoredMatrix, is_transposed: bool) -> tuple[str, str]:
        return m.url, m.fingerprint() if is_transposed else ""
