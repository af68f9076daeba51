"""Builds, checks and describes the artifacts of a release: `make dist`.

The artifacts are written to `dist/`: the source archive, the pure-Python wheel, a wheel with the
compiled modules if this machine can compile them, an SBOM (CycloneDX) and a licence list for each
set of extras, and `SHA256SUMS`. Each artifact is built twice; the two builds must have equal bytes.
`make dist` installs and runs both wheels in new environments outside of the source tree.
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
        SystemExit: if the program fails; the message is the program's output.
    """
    # Remove PYTHONPATH: through it, a clean environment would find the source tree.
    own = ("PYTHONPATH", "LOGQUARRY_COMPILED")
    base = {name: value for name, value in os.environ.items() if name not in own}
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
    """Return the time of the commit.

    The files in the artifacts get this time, so that two builds are equal.
    """
    return run(["git", "log", "-1", "--format=%ct"]).strip()


def committed(target: Path) -> Path:
    """Copy the committed files to a folder, so that the artifacts contain no other files."""
    target.mkdir()
    archive = target.with_suffix(".tar")
    run(["git", "archive", "--output", archive, "HEAD"])
    with tarfile.open(archive) as files:
        files.extractall(target, filter="data")
    if changed := run(["git", "status", "--porcelain"]).splitlines():
        print(f"{len(changed)} changed files are not committed, and so not in the artifacts")
    return target


def build(python: Path, source: Path, target: Path) -> None:
    """Build the source archive, the pure wheel, and if possible the compiled wheel."""
    environ = {"SOURCE_DATE_EPOCH": commit_time()}
    command: list[str | os.PathLike[str]] = [python, "-m", "build", "--outdir", target]
    # Build the compiled wheel first. Without a C compiler, the result is a pure wheel, which the
    # next build replaces.
    run([*command, "--wheel", source], environ=environ)
    run([*command, source], environ={**environ, "LOGQUARRY_COMPILED": "off"})


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def names_in(artifact: Path) -> list[str]:
    """List the files in a wheel, or in a source archive without its top folder."""
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as archive:
            return archive.namelist()
    with tarfile.open(artifact) as archive:
        return [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]


def check_contents(artifact: Path) -> None:
    """Check that an artifact contains only files of the repository and generated metadata.

    Raises:
        SystemExit: if the artifact has other files.
    """
    tracked = set(run(["git", "ls-tree", "-r", "--name-only", "HEAD"]).splitlines())
    if artifact.suffix == ".whl":
        known = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
        # A platform wheel also has the compiled modules.
        made = re.compile(r"[^/]+\.dist-info/.*|.*\.(so|pyd)|logquarry/compiled\.[\w-]+\.stamp")
    else:
        known, made = tracked, re.compile("PKG-INFO")
    odd = [n for n in names_in(artifact) if n not in known and not made.fullmatch(n)]
    if odd:
        raise SystemExit(f"{artifact.name} has files that the repository does not have: {odd[:5]}")


def is_pure(wheel: Path) -> bool:
    """Whether a wheel fits every Python and system, because it contains no compiled module."""
    return wheel.name.endswith("-none-any.whl")


def try_wheel(wheel: Path, extra: str, work: Path) -> tuple[Path, float]:
    """Install a wheel outside of the source tree, and run the demo and `info` there.

    Returns:
        (Python of the environment, seconds until the demo had exported its rows).
    """
    began = time.monotonic()
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    place = Path(tempfile.mkdtemp(dir=work))
    python = environment(place / "env", wanted)
    home = place / "run"
    home.mkdir()
    # Use an empty cache, so that kernels that this machine has compiled before do not shorten the
    # time.
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
    state = "interpreted" if is_pure(wheel) else "compiled"
    if f"single puts run {state}" not in run([command, "--version", "-v"], cwd=home):
        raise SystemExit(f"{wheel.name}: single puts do not run {state}")
    return python, seconds


def describe(tools: Path, python: Path, target: Path, name: str) -> None:
    """Remove pip from an environment, and write the environment's SBOM and licence list."""
    run([python, "-m", "pip", "uninstall", "--yes", "--quiet", "setuptools", "pip"])
    sbom = target / f"sbom-{name}.cdx.json"
    options = ["--output-reproducible", "--of", "JSON", "--pyproject", str(ROOT / "pyproject.toml")]
    run([tools, "-m", "cyclonedx_py", "environment", *options, "-o", sbom, python])
    licences = target / f"licences-{name}.md"
    options = ["--python", str(python), "--format", "markdown", "--with-urls"]
    licences.write_text(run([tools.with_name("pip-licenses"), *options]), "utf-8")


def megabytes(python: Path) -> float:
    """Return the size of an environment's packages in MB."""
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
            # Build in two folders with different paths: if an artifact contains its folder's path,
            # the two builds differ.
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
        (pure,) = (path for path in artifacts if is_pure(path))
        for wheel in artifacts:
            if wheel.suffix == ".whl" and wheel != pure:
                try_wheel(wheel, BASE, work)
        for extra in extras:
            python, seconds = try_wheel(pure, extra, work)
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
