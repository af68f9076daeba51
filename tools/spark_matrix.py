"""Runs tests/spark/matrix on each version of Spark.

Run `make test-matrix`, or this script with the names of cells. A cell is a version of Spark with a
version of Python.

Each cell has a virtual environment below `.matrix/`, or below the folder in MATRIX_DIR. If this
machine lacks the Python of a cell, the cell is skipped, and the summary names the cell. An argument
such as `3.5` or `4.3-py3.13` selects the cells whose names begin with it. With
`--skip-unavailable`, a cell is also skipped if pip cannot install its packages, for example without
a network. With `--only-install`, the environments are made, and no test runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CELLS = ("3.5-py3.11", "4.0-py3.11", "4.0-py3.12", "4.1-py3.12", "4.2-py3.13", "4.3-py3.13")
SKIP = "--skip-unavailable"
ONLY_INSTALL = "--only-install"
MOST_SECONDS = 1800
"""Maximum seconds to install a cell, and maximum seconds to test a cell."""
MOST_SECONDS_OF_CI = 240
"""Maximum seconds to install a cell with `--skip-unavailable`: a slow network must not stop CI."""
# PySpark 3.5 imports distutils, which setuptools provides on newer Pythons.
TOOLS = ("pytest>=9", "pytest-timeout>=2.4", "hypothesis", "setuptools<81", "zstandard")


@dataclass(frozen=True)
class Cell:
    """A version of Spark with a version of Python."""

    name: str

    @property
    def spark(self) -> str:
        """The minor version of Spark."""
        return self.name.partition("-py")[0]

    @property
    def python(self) -> str:
        """The minor version of Python."""
        return self.name.partition("-py")[2]

    @property
    def folder(self) -> Path:
        """The folder of the environment."""
        return Path(os.environ.get("MATRIX_DIR", ROOT / ".matrix")).absolute() / self.name

    def make(self, base: str, seconds: int = MOST_SECONDS) -> bool:
        """Make the environment if it does not exist; return whether it can be used."""
        done = self.folder / ".installed"
        if done.exists():
            return True
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        extras = project["optional-dependencies"]
        # Omit the extra for Spark 3.5, whose tests do not use Connect: with the extra, pip would
        # build 300 MB for each release 3.5.*.
        name = "pyspark" if self.spark == "3.5" else "pyspark[connect]"
        wanted = [f"{name}=={self.spark}.*", *project["dependencies"], *TOOLS]
        wanted += extras["fast"]
        wanted += [text for text in extras["spark"] if text.startswith("pandas")]
        wanted += [text for text in extras["lakehouse"] if text.startswith("deltalake")]
        installs = [(self.folder, wanted)]
        if self.spark != "3.5":
            installs.append((self.folder / "client", [self.client, *project["dependencies"]]))
        for folder, packages in installs:
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            pip += ["--disable-pip-version-check", *packages]
            if not succeeds([base, "-m", "venv", str(folder)], seconds=seconds):
                return False
            if not succeeds(pip, seconds=seconds):
                return False
        done.touch()
        return True

    @property
    def client(self) -> str:
        """The pip requirement of the package of Spark Connect's client.

        This package has fewer versions than PySpark.
        """
        major, minor = self.spark.split(".")
        return f"pyspark-client>={major},<{major}.{int(minor) + 1}"

    def test(self) -> bool:
        """Run the tests; return whether they passed."""
        python = str(self.folder / "bin" / "python")
        words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/spark/matrix"]
        # Do not turn warnings into errors: each PySpark has warnings that only PySpark itself could
        # avoid.
        words += ["-W", "default", "--disable-warnings"]
        # After one test has timed out, no other test can use the Spark session.
        words += ["--timeout", str(MOST_SECONDS), "--exitfirst"]
        # The compiled modules in the source tree fit only the Python in .venv, so run them
        # interpreted.
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LOGQUARRY_COMPILED": "off"}
        return succeeds(words, environ)


def succeeds(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    seconds: int = MOST_SECONDS,
) -> bool:
    """Run a program; return whether it succeeded in time."""
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{command[0]} took more than {seconds} s", file=sys.stderr)
        return False
    return done.returncode == 0


def find_python(version: str) -> str | None:
    """Return a Python of a minor version that can make environments; None if there is none."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name), *(str(p) for p in pyenv.glob(f"{version}.*/bin/{name}"))]
    for found in candidates:
        # Run the program: a name on PATH may be the shim of a version manager for a version that is
        # not installed.
        if (
            found
            and not subprocess.run(
                [found, "-c", "import ensurepip, venv"], check=False, capture_output=True
            ).returncode
        ):
            return found
    return None


def main(names: list[str]) -> int:
    """Run the cells whose names begin with one of `names`, or all; return the exit code."""
    may_skip = SKIP in names
    only_install = ONLY_INSTALL in names
    names = [name for name in names if name not in (SKIP, ONLY_INSTALL)]
    chosen = [Cell(c) for c in CELLS if not names or any(c.startswith(name) for name in names)]
    if not chosen:
        print(f"no such cell; there are: {', '.join(CELLS)}", file=sys.stderr)
        return 2
    told: list[str] = []
    failed = False
    for cell in chosen:
        base = find_python(cell.python)
        if base is None:
            told.append(f"{cell.name}: skipped, this machine has no Python {cell.python}")
            continue
        begin = time.monotonic()
        passed = cell.make(base, MOST_SECONDS_OF_CI if may_skip else MOST_SECONDS)
        installed = time.monotonic()
        if not passed and may_skip:
            told.append(f"{cell.name}: skipped, its packages could not be installed")
            continue
        passed = passed and (only_install or cell.test())
        failed |= not passed
        ended = time.monotonic()
        told.append(
            f"{cell.name}: {'passed' if passed else 'FAILED'}, {installed - begin:.0f} s to "
            f"install and {ended - installed:.0f} s to test"
        )
    print("\n".join(told))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
