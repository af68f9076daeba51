"""What the JVM of a session is started with: our Java, what makes its work quick, a quiet log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from logquarry.spark.java import java_home

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
