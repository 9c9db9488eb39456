r"""C in an S3 server: what spdist writes and reads a second, beside what obstore alone moves in the same run.

::

    AWS_ENDPOINT_URL=http://127.0.0.1:8333 AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \
        python benchmarks/object_store.py [--rounds N] [--out FILE]

With --quick a simulated server of this process serves. The bucket ``spdist-benchmark`` is made if it is not there. C is
written by a product of local factors, to a new place each time, and read whole afterwards; the same with fsspec in
place of obstore; and objects of 8 MiB by obstore alone, eight at a time. Rates are of stored bytes. On a machine that
the server shares, CPU seconds say more than rates: those of this process, and of the process that S3_SERVER_PID names.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psutil
import record

import spdist
from spdist.stores import service
from spdist.stores.registry import at

BUCKET = "spdist-benchmark"
OBJECT, AT_ONCE = 8 << 20, 8
LIMIT = "4GiB"


def start_simulation() -> Any:
    """Start a simulated S3 in this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
    return server


class Effort:
    """Wall time, and CPU seconds of this process and of the server, of a ``with`` block."""

    def __enter__(self) -> Effort:
        self.begin = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.client, self.server = (b - a for a, b in zip(self.begin, self._now(), strict=True))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        pids = [os.getpid(), int(os.environ.get("S3_SERVER_PID", "0"))]
        return time.perf_counter(), *(sum(psutil.Process(pid).cpu_times()[:2]) if pid else 0.0 for pid in pids)

    def of(self, nbytes: int, what: str) -> dict[str, float]:
        """Return MB/s, and CPU seconds per GB."""
        each = {"": nbytes / self.seconds / 1e6, "_client": self.client / nbytes * 1e9}
        return {f"{what}{name}": value for name, value in {**each, "_server": self.server / nbytes * 1e9}.items()}


def raw(nbytes: int) -> dict[str, float]:
    """Return MB/s that obstore alone writes and reads, and CPU seconds."""
    import obstore

    store, content = service.open_objects(f"s3://{BUCKET}/raw").store, os.urandom(OBJECT)
    names = [f"{i}" for i in range(max(1, nbytes // OBJECT))]
    found = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for what, call in (
            ("write", lambda name: obstore.put(store, name, content, use_multipart=False)),
            ("read", lambda name: len(obstore.get(store, name).bytes())),
        ):
            with Effort() as effort:
                list(pool.map(call, names))
            found |= effort.of(len(names) * OBJECT, what)
    return found


def product(a: Any, url: str) -> dict[str, float]:
    """Return the seconds of a product to a URL, MB/s of its blocks and of reading C, and CPU seconds."""
    url = f"{url}-{uuid4().hex[:8]}.zarr"
    with Effort() as writing:
        report = spdist.multiply(a, a, url, memory_limit=LIMIT)
    c, stored = spdist.open(url), at(url).stored_bytes()
    with Effort() as reading:
        c.to_scipy()
    at(url).discard()
    found = writing.of(stored, "write") | reading.of(stored, "read")
    return found | {"seconds": writing.seconds, "write": stored / report.phases["run"] / 1e6, "bytes": stored}


def main() -> None:
    """Measure, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=600_000)
    args = parser.parse_args()
    server = start_simulation() if args.quick else None
    rounds, rows = (1, 2_000) if args.quick else (args.rounds, args.rows)
    import s3fs

    s3fs.S3FileSystem(use_listings_cache=False).mkdirs(BUCKET, exist_ok=True)
    results: dict[str, list[dict[str, float]]] = {}
    opens = service.opens
    with tempfile.TemporaryDirectory() as folder:
        a = spdist.generate("erdos-renyi", f"{folder}/A.zarr", nrows=rows, ncols=rows, per_row=8)
        spdist.multiply(a, a, f"{folder}/warm.zarr", memory_limit=LIMIT)  # kernels are compiled once for a machine
        for turn in range(rounds):
            results.setdefault("obstore alone", []).append(raw(1 << 20 if args.quick else 1 << 29))
            ways = [("local", f"{folder}/C", True), ("obstore", f"s3://{BUCKET}/C", True),
                    ("fsspec", f"s3://{BUCKET}/C", False)]  # fmt: skip
            for name, url, with_obstore in ways[:: 1 - 2 * (turn % 2)]:
                service.opens = opens if with_obstore else lambda url: False  # type: ignore[assignment]
                results.setdefault(name, []).append(product(a, url))
        service.opens = opens
    at(f"s3://{BUCKET}/raw").discard()
    medians = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in results.items()
    }
    for name, found in medians.items():
        print(f"{name:14} " + ", ".join(f"{key} {value:,.1f}" for key, value in found.items()))
    content = {"benchmark": "object_store", "server": "moto" if args.quick else os.environ.get("S3_SERVER", "")}
    record.write(content | {"rounds": rounds, "rows": rows, "results": medians, "trials": results}, args.out)
    if server is not None:
        server.stop()


if __name__ == "__main__":
    main()
