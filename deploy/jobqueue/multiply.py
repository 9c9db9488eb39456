"""Run a job file on workers that are jobs of a batch system: PBS, LSF, SGE and whatever else dask-jobqueue knows.

::

    python deploy/jobqueue/multiply.py QUEUE.yaml JOB.yaml [--set key=value ...]

QUEUE.yaml has settings of dask-jobqueue for one batch system, and how many jobs it may have at a time (`most_jobs`);
pbs.yaml and lsf.yaml are examples. Jobs come as the product has blocks for them, and go when it has none. A job that is
lost, or ends at its time limit, costs its blocks, and another one is submitted. This process is the scheduler: run it
where nodes reach it, for instance in a job of one core. Signals and exit codes are those of workflows/multiply.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DASK = ROOT / "deploy" / "dask.yaml"
"""What spdist asks of schedulers and workers."""
WRONG = 2
"""Exit code for settings that are wrong; nothing was started."""


def refuse(line: str) -> int:
    """Say what is wrong; return the exit code."""
    print(line, file=sys.stderr)
    return WRONG


def settings_of(path: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the batch system and its settings; raise ValueError, which names the file, if it has none."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())["jobqueue"]
        ((name, settings),) = found.items()
        return name, dict(settings)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: holds no settings of one batch system under jobqueue ({type(error).__name__}): see pbs.yaml"
        ) from None


def cluster_class(name: str) -> Any:
    """Return dask-jobqueue's class of clusters of a batch system; raise ValueError if it has none."""
    try:
        import dask_jobqueue
    except ImportError as error:
        raise ValueError(f"dask-jobqueue is not installed ({error}): pip install dask-jobqueue") from None
    classes = {
        kind.removesuffix("Cluster").lower(): one for kind, one in vars(dask_jobqueue).items() if "Cluster" in kind
    }
    if name not in classes:
        raise ValueError(f"{name} is no batch system of dask-jobqueue: write one of {', '.join(sorted(classes))}")
    return classes[name]


def main(argv: list[str]) -> int:
    """Start the cluster, run the job on it, and return the job's exit code."""
    if len(argv) < 2:
        return refuse(f"usage: python {sys.argv[0]} QUEUE.yaml JOB.yaml [--set key=value ...]")
    import dask.config
    import yaml
    from distributed import Security

    try:
        name, settings = settings_of(argv[0])
        made = cluster_class(name)
    except ValueError as error:
        return refuse(str(error))
    most = settings.pop("most_jobs", 1)
    dask.config.update(dask.config.config, yaml.safe_load(DASK.read_text()))
    settings["job_script_prologue"] = [f"export DASK_CONFIG='{DASK}'", *settings.get("job_script_prologue", [])]
    with tempfile.TemporaryDirectory(prefix=".spdist-", dir=".") as folder:  # of this user alone, seen by all nodes
        place = Path(folder).resolve()
        keys = ["-m", "spdist", "cluster-keys", str(place / "keys"), "--json"]
        files = json.loads(subprocess.run([sys.executable, *keys], check=True, capture_output=True).stdout)
        roles = {
            f"tls_{role}_{part}": files[part] for role in ("client", "scheduler", "worker") for part in ("cert", "key")
        }
        security = Security(require_encryption=True, tls_ca_file=files["ca-file"], **roles)
        options = {"python": sys.executable, "security": security, "log_directory": str(place)} | settings
        with made(**options) as cluster:
            cluster.adapt(minimum=0, maximum_jobs=most)
            (place / "scheduler.json").write_text(json.dumps({"address": cluster.scheduler_address}))
            return run(place, argv[1:])


def run(place: Path, words: list[str]) -> int:
    """Run the job on the cluster whose scheduler file and keys lie in a folder; hand on signals."""
    set_words = ["workers=null", "scheduler=null", f"scheduler_file='{place / 'scheduler.json'}'"]
    command = [sys.executable, str(ROOT / "workflows" / "multiply.py"), *words]
    process = subprocess.Popen(
        ["bash", "-c", f'source "{place}/keys/environment.sh"; exec "$@"', "job", *command]
        + [word for one in set_words for word in ("--set", one)]
    )

    def hand_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, hand_on)
    return process.wait()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1:]))
