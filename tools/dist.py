"""Builds, checks and describes the artifacts of a release: `make dist`.

`dist/` gets the wheel, the source archive, an SBOM (CycloneDX) and a licence list for each set of
extras, and `SHA256SUMS`. Each artifact is built twice; the two builds must have equal bytes. The
wheel is installed into a new environment outside of the source tree, and runs there.

With LOGQUARRY_COMPILED=1 in the environment a second wheel is built with that variable set, for a
backend that compiles modules then. A platform wheel is compared and checked like the pure one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("build>=1.3", "twine>=6", "cyclonedx-bom>=7", "pip-licenses>=5")
BASE, WITH_SPARK = "", "spark"


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run a program and return its output.

    Raises:
        SystemExit: if it fails, with its output.
    """
    # PYTHONPATH would let a clean environment find the source tree.
    base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**base, **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = " ".join(map(str, command))
        raise SystemExit(
            f"{words}\nfailed with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def environment(folder: Path, *wanted: str) -> Path:
    """Make a virtual environment with some packages; return its Python."""
    run([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])
    return python


def commit_time() -> str:
    """The time of the commit, which is the time of each file in the artifacts."""
    return run(["git", "log", "-1", "--format=%ct"]).strip()


def committed(target: Path) -> Path:
    """Copy the committed files to a folder: the artifacts have no file of this machine alone."""
    target.mkdir()
    archive = target.with_suffix(".tar")
    run(["git", "archive", "--output", archive, "HEAD"])
    with tarfile.open(archive) as files:
        files.extractall(target, filter="data")
    if changed := run(["git", "status", "--porcelain"]).splitlines():
        print(f"{len(changed)} changed files are not committed, and so not in the artifacts")
    return target


def build(python: Path, source: Path, target: Path) -> None:
    """Build the source archive, and from it the wheels, into a folder."""
    environ = {"SOURCE_DATE_EPOCH": commit_time()}
    run([python, "-m", "build", "--outdir", target, source], environ=environ)
    if os.environ.get("LOGQUARRY_COMPILED"):
        compiled = target / "compiled"
        environ["LOGQUARRY_COMPILED"] = "1"
        run([python, "-m", "build", "--wheel", "--outdir", compiled, source], environ=environ)
        for path in compiled.glob("*.whl"):
            path.replace(target / path.name)
        shutil.rmtree(compiled)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def names_in(artifact: Path) -> list[str]:
    """The files in a wheel or a source archive, without the folder of the latter."""
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as archive:
            return archive.namelist()
    with tarfile.open(artifact) as archive:
        return [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]


def check_contents(artifact: Path) -> None:
    """Check that an artifact has only files of the repository, and its generated metadata.

    Raises:
        SystemExit: if not.
    """
    tracked = set(run(["git", "ls-tree", "-r", "--name-only", "HEAD"]).splitlines())
    if artifact.suffix == ".whl":
        known = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
        # A platform wheel also has the compiled modules.
        made = re.compile(r"[^/]+\.dist-info/.*|.*\.(so|pyd)")
    else:
        known, made = tracked, re.compile("PKG-INFO")
    odd = [n for n in names_in(artifact) if n not in known and not made.fullmatch(n)]
    if odd:
        raise SystemExit(f"{artifact.name} has files that the repository does not have: {odd[:5]}")


def try_wheel(wheel: Path, extra: str, work: Path) -> tuple[Path, float]:
    """Install a wheel outside of the source tree, and run the demo and `info` there.

    Returns:
        The environment's Python, and the seconds until the demo's rows were exported.
    """
    began = time.monotonic()
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    python = environment(work / f"env-{extra or 'base'}", wanted)
    home = work / f"run-{extra or 'base'}"
    home.mkdir()
    # The compiled kernels of this machine must not help.
    environ = {"LOGQUARRY_CACHE_DIR": str(home / "cache")}
    command = python.with_name("logquarry")
    run([command, "demo", "--to", "demo"], cwd=home, environ=environ)
    seconds = time.monotonic() - began
    code = "import importlib.resources as r; print(r.files('logquarry') / 'data')"
    data = run([python, "-c", code], cwd=home).strip()
    with tarfile.open(Path(data) / "real-broker.tar.xz") as archive:
        archive.extractall(home, filter="data")
    found = json.loads(run([command, "info", "real-broker/store", "--json"], cwd=home))
    if not found:
        raise SystemExit(f"{wheel.name}: info printed nothing")
    return python, seconds


def describe(tools: Path, python: Path, target: Path, name: str) -> None:
    """Write the SBOM and the licence list of an environment; it loses pip, which is no part."""
    run([python, "-m", "pip", "uninstall", "--yes", "--quiet", "setuptools", "pip"])
    sbom = target / f"sbom-{name}.cdx.json"
    options = ["--output-reproducible", "--of", "JSON", "--pyproject", str(ROOT / "pyproject.toml")]
    run([tools, "-m", "cyclonedx_py", "environment", *options, "-o", sbom, python])
    licences = target / f"licences-{name}.md"
    options = ["--python", str(python), "--format", "markdown", "--with-urls"]
    licences.write_text(run([tools.with_name("pip-licenses"), *options]), "utf-8")


def megabytes(python: Path) -> float:
    """The size of what is installed in an environment, in MB."""
    packages = next((python.parents[1] / "lib").glob("python3.*")) / "site-packages"
    files = [path for path in packages.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files) / 1e6


def main(extras: Sequence[str]) -> int:
    """Build and check; each extra gets an environment, an SBOM and a licence list."""
    target = ROOT / "dist"
    with tempfile.TemporaryDirectory(prefix="logquarry-dist-") as folder:
        work = Path(folder)
        tools = environment(work / "tools", *TOOLS)
        for number in ("first", "second"):
            # Another folder each time: its path must not be in the artifacts.
            build(tools, committed(work / f"source-{number}"), work / number)
        first, second = digests(work / "first"), digests(work / "second")
        if first != second:
            raise SystemExit(f"two builds differ: {first} and {second}")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(work / "first", target)
        artifacts = sorted(target.iterdir())
        run([tools, "-m", "twine", "check", "--strict", *artifacts])
        for artifact in artifacts:
            check_contents(artifact)
            print(f"{artifact.name}: {artifact.stat().st_size / 1e6:.1f} MB, two equal builds")
        wheel = next(target.glob("*-none-any.whl"))
        for extra in extras:
            python, seconds = try_wheel(wheel, extra, work)
            name = extra or "base"
            describe(tools, python, target, name)
            print(
                f"{name}: {megabytes(python):.0f} MB installed; installation and demo took "
                f"{seconds:.0f} s"
            )
        sums = [f"{digest}  {name}" for name, digest in digests(target).items()]
        (target / "SHA256SUMS").write_text("\n".join([*sums, ""]), "ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or (BASE, WITH_SPARK)))
