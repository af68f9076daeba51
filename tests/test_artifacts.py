"""What a release consists of: versions, contents, extras, the image, and how they are built."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hatch_build
import logquarry
from tools import dist, spark_matrix

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CONTAINERFILE = (ROOT / "Containerfile").read_text("utf-8")


def test_the_versions_agree() -> None:
    assert PROJECT["version"] == logquarry.__version__


def test_the_base_brings_neither_spark_nor_numba() -> None:
    names = {re.match(r"[\w-]+", text)[0] for text in PROJECT["dependencies"]}  # type: ignore[index]
    assert names == {"numpy", "zlib-ng", "pyarrow", "click", "rich"}


def test_all_brings_each_extra_but_the_development_tools() -> None:
    (whole,) = EXTRAS["all"]
    named = whole.removeprefix("logquarry[").removesuffix("]").split(",")
    assert set(named) == EXTRAS.keys() - {"all", "dev", "docs"}


def test_each_extra_that_a_text_names_exists() -> None:
    """In errors, docstrings and pages: `pip install 'logquarry[NAME]'`."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
    found = [
        (path, name)
        for path in pages
        for names in re.findall(r"logquarry\[([a-z,]+)\]", path.read_text("utf-8"))
        for name in names.split(",")
    ]
    assert len(found) > 10
    assert [(path, name) for path, name in found if name not in EXTRAS] == []


def test_the_image_runs_as_no_root_user_and_takes_extras_that_exist() -> None:
    named = re.findall(r"EXTRAS=([a-z,]+)", CONTAINERFILE)
    assert named
    assert {name for names in named for name in names.split(",")} <= EXTRAS.keys()
    last = CONTAINERFILE[CONTAINERFILE.rindex("\nFROM ") :]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, re.MULTILINE)
    # Nothing below the root file system is written.
    assert "LOGQUARRY_CACHE_DIR=/tmp/" in last
    assert "PYTHONDONTWRITEBYTECODE=1" in last


def test_the_image_is_built_from_all_files_that_the_build_reads() -> None:
    copied = set(re.findall(r"^COPY (.*) \./$", CONTAINERFILE, re.MULTILINE)[0].split())
    named = {"pyproject.toml", "hatch_build.py", PROJECT["readme"], *PROJECT["license-files"]}
    assert copied == named


def test_a_switch_makes_the_wheel_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hatch_build.CompileHook, "target_name", "wheel", raising=False)
    monkeypatch.setattr(hatch_build, "compile_modules", lambda: None)
    hook = hatch_build.CompileHook.__new__(hatch_build.CompileHook)
    for value, pure in (("off", True), ("", False)):
        monkeypatch.setenv("LOGQUARRY_COMPILED", value)
        data: dict[str, Any] = {"force_include": {}}
        hook.initialize("standard", data)
        assert data.get("pure_python", True) == pure
        assert bool(data["force_include"]) != pure


@pytest.mark.parametrize("own", ["gcc -pthread", "other"])
def test_the_variable_cc_names_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    # Distributors change CC, and leave LDSHARED as it was.
    monkeypatch.setitem(sysconfig.get_config_vars(), "LDSHARED", "gcc -pthread -shared")
    monkeypatch.setitem(sysconfig.get_config_vars(), "CC", own)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "error: $*" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} -first")
    with pytest.raises(RuntimeError, match=r"the C compiler failed: error: -first .*/x\.c -o "):
        hatch_build._compile(tmp_path / "x.c")


def test_the_image_has_a_python_that_the_package_supports() -> None:
    (version,) = re.findall(r"^ARG PYTHON=(\S+)$", CONTAINERFILE, re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_junk_in_an_artifact_is_found(tmp_path: Path) -> None:
    wheel, source = tmp_path / "x-py3-none-any.whl", tmp_path / "x.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("logquarry/__init__.py", "")
        archive.writestr("logquarry-1.dist-info/RECORD", "")
        archive.writestr("logquarry/_speed.abi3.so", "")
    dist.check_contents(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("logquarry/__pycache__/errors.pyc", "")
    with pytest.raises(SystemExit, match=r"errors\.pyc"):
        dist.check_contents(wheel)
    with tarfile.open(source, "w:gz") as tar:
        tar.add(ROOT / "README.md", "x-1/README.md")
        tar.add(ROOT / "README.md", "x-1/PKG-INFO")
    dist.check_contents(source)
    with tarfile.open(source, "w:gz") as tar:
        tar.add(ROOT / "README.md", "x-1/saved/lock")
    with pytest.raises(SystemExit, match="saved/lock"):
        dist.check_contents(source)


def test_a_cell_of_the_matrix_that_cannot_be_installed_is_skipped_only_if_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spark_matrix, "find_python", lambda version: sys.executable)
    monkeypatch.setattr(spark_matrix.Cell, "make", lambda *_: False)
    assert spark_matrix.main(["3.5"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert spark_matrix.main(["--skip-unavailable", "3.5"]) == 0
    assert "3.5-py3.11: skipped, its packages could not be installed" in capsys.readouterr().out
    # Failed tests fail in either case.
    monkeypatch.setattr(spark_matrix.Cell, "make", lambda *_: True)
    monkeypatch.setattr(spark_matrix.Cell, "test", lambda self: False)
    assert spark_matrix.main(["--skip-unavailable", "3.5"]) == 1
    assert spark_matrix.main(["--only-install", "3.5"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_artifacts_are_built_alike_twice_and_run_elsewhere() -> None:
    """Downloads the tools and the base's dependencies; writes dist/."""
    subprocess.run([sys.executable, "-m", "tools.dist"], cwd=ROOT, check=True)
    names = {path.name for path in (ROOT / "dist").iterdir()}
    assert {"SHA256SUMS", "sbom-base.cdx.json", "licences-base.md"} <= names
    assert f"logquarry-{logquarry.__version__}-py3-none-any.whl" in names
