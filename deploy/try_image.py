"""Run the Dockerfile's steps without Docker, in roots made by debootstrap, and use what comes of them: `make image`.

::

    sudo python deploy/try_image.py FOLDER [--mirror URL] [--bind PATH ...] [--arg NAME=VALUE ...]

FOLDER gets a root for each stage. PATHs of this machine, such as pip's settings and its packages, are seen while the
steps run and are not in the image. The base is a minimal Debian with Python, in place of the image `python:slim`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "python3,python3-venv,ca-certificates"
"""What the base has besides a minimal Debian."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are before the Dockerfile says more."""
USES = (
    "spdist --version",
    "generate rmat /work/A.zarr --scale 12",
    "multiply /work/A.zarr /work/A.zarr /work/C.zarr --memory-limit 256MiB --verify",
    "python /opt/spdist/share/multiply.py /work/job.yaml",
    "dask-worker --version",
    "dask-scheduler --version",
)
"""What is run in the image, as any user, on a root that is read-only."""
JOB = "a: /work/A.zarr\nb: /work/A.zarr\nout: /work/D.zarr\nmemory_limit: 256MiB\n"


@dataclass
class Stage:
    """A root that steps change."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)  # ENV and ARG
    folder: str = "/"  # WORKDIR
    entry: list[str] = field(default_factory=list)  # ENTRYPOINT

    def command(self, words: list[str], binds: list[str], user: int = 0, *, whole: bool = True) -> list[str]:
        """Return the words that run a command in the root.

        `binds`: paths of this machine that are seen there.
        `whole`: whether the root may be written to; else only /tmp and /work.
        """
        lines = ["set -e", f"mount --bind {self.root} {self.root}", f"mount -t proc proc {self.root}/proc"]
        for path in binds:
            made = (
                f"mkdir -p {self.root}{path}"
                if Path(path).is_dir()
                else f"mkdir -p {self.root}{Path(path).parent}; touch {self.root}{path}"
            )
            lines += [made, f"mount --bind -o ro {path} {self.root}{path}"]
        if not whole:
            lines += [f"mount -t tmpfs tmpfs {self.root}/tmp", f"mount -o remount,bind,ro {self.root}",
                      f"mount --bind {self.root}-work {self.root}/work"]  # fmt: skip
        given = [f"{name}={value}" for name, value in {"PATH": PATH, **self.variables}.items()]
        inside = ["chroot", f"--userspec={user}:{user}", str(self.root), "env", "-i", "-C", self.folder, *given, *words]
        lines.append(f"exec {shlex.join(inside)}")
        return ["unshare", "--mount", "--pid", "--fork", "sh", "-c", "\n".join(lines)]


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with its words."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path of the repository into the build: the last rule that fits counts."""
    sent, around = True, [path, *map(str, Path(path).parents)]
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if not rule.startswith("#") and any(fnmatch.fnmatch(one, rule.removeprefix("!")) for one in around):
            sent = rule.startswith("!")
    return sent


def copy(words: list[str], stage: Stage, stages: dict[str, Stage]) -> None:
    """Do what COPY says."""
    source = ROOT
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *given, place = words
    to = stage.root / (place if place.startswith("/") else f"{stage.folder}/{place}").lstrip("/")
    paths = [path for one in given for path in sorted(source.glob(one.lstrip("/")))]
    for path in paths:
        if source == ROOT and not is_sent(str(path.relative_to(ROOT))):
            raise SystemExit(f"{path.relative_to(ROOT)} is not sent to the build: see .dockerignore")
        into = to / path.name if place.endswith("/") or (to.is_dir() and path.is_file()) else to
        into.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(
                path,
                into,
                symlinks=True,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__") if source == ROOT else None,
            )
        else:
            shutil.copy2(path, into)
    if not paths:
        raise SystemExit(f"COPY {' '.join(words)}: nothing is there")


def build(folder: Path, base: Path, binds: list[str], given: dict[str, str]) -> Stage:
    """Run all steps; return the last stage."""
    stages: dict[str, Stage] = {}
    defaults: dict[str, str] = {}
    stage = Stage(base)
    for kind, rest in instructions((ROOT / "deploy" / "Dockerfile").read_text()):
        if kind == "FROM":
            name = rest.split()[2] if " AS " in rest else "image"
            stage = stages[name] = Stage(folder / name)
            subprocess.run(["cp", "-a", "--reflink=auto", base, stage.root], check=True)
        elif kind == "ARG":
            name, _, value = rest.partition("=")
            known = defaults if not stages else stage.variables
            known[name] = given.get(name, value.strip('"') or defaults.get(name, ""))
        elif kind == "ENV":
            for word in shlex.split(rest):
                name, _, value = word.partition("=")
                stage.variables[name] = value.replace("$PATH", stage.variables.get("PATH", PATH))
        elif kind == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif kind == "COPY":
            copy(rest.split(), stage, stages)
        elif kind == "RUN":
            print(f"RUN {rest}", flush=True)
            subprocess.run(stage.command(["/bin/sh", "-c", rest], binds), check=True)
        elif kind == "ENTRYPOINT":
            stage.entry = json.loads(rest)
    return stage


def megabytes(path: Path) -> int:
    """Return the size of a root without apt's cache and lists, which the base of the Dockerfile does not keep."""
    for name in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(path / name, ignore_errors=True)
    return int(subprocess.run(["du", "-sm", path], check=True, capture_output=True, text=True).stdout.split()[0])


def use(stage: Stage, user: int) -> None:
    """Run what users run, as a user whom the image does not know, on a root that is read-only."""
    work = Path(f"{stage.root}-work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    (work / "job.yaml").write_text(JOB)
    os.chown(work, user, user)
    (stage.root / "work").mkdir(exist_ok=True)
    for words in USES:
        begin = time.perf_counter()
        done = subprocess.run(
            stage.command([*stage.entry, *words.split()], [], user, whole=False), capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        print(f"{words}: exit code {done.returncode}, {time.perf_counter() - begin:.1f} s", flush=True)
        if done.returncode or "compiling" in said:
            raise SystemExit(said)


def main() -> None:
    """Make the roots, run the steps, use the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mirror", default="", help="of Debian; by default debootstrap's")
    parser.add_argument("--suite", default="bookworm")
    parser.add_argument("--bind", action="append", default=["/etc/resolv.conf"], metavar="PATH")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    base = args.folder.resolve() / "base"
    if not (base / "usr/local/bin/python").exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        mirror = [args.mirror] if args.mirror else []
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", args.suite, str(base), *mirror]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        (base / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for name in ("build", "image"):
        shutil.rmtree(base.parent / name, ignore_errors=True)
    stage = build(base.parent, base, args.bind, dict(one.split("=", 1) for one in args.arg))
    use(stage, 12345)
    print(f"{megabytes(stage.root) - megabytes(base)} MB on top of the base")


if __name__ == "__main__":
    sys.exit(main())
