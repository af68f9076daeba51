"""Each exit code, and Ctrl-C at every moment of a process."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

import logquarry as lq
from logquarry.cli import main as cli_main
from logquarry.cli import outcome, output
from logquarry.cli import spark as with_spark
from logquarry.cli.outcome import ExitCode, exit_code
from logquarry.errors import (
    LIMITS,
    BadRow,
    CorruptFrame,
    MessageNotFound,
    ReplicationError,
    SourceNotReadable,
    StoreNotFound,
    StoreUnavailable,
    UsageError,
    write_reason,
)
from tests.helpers.command import run
from tests.helpers.operator_faults import full_disk
from tests.helpers.small_store import opened


def caused_by(number: int) -> StoreNotFound:
    """The error of a store whose files cannot be opened."""
    error = StoreNotFound("x")
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), ExitCode.USAGE),
        (StoreNotFound("x"), ExitCode.UNREADABLE),
        (SourceNotReadable("x"), ExitCode.UNREADABLE),
        (PermissionError(errno.EACCES, "x"), ExitCode.UNREADABLE),
        (OSError(errno.EIO, "x"), ExitCode.UNREADABLE),
        (OSError(errno.ENOSPC, "x"), ExitCode.REFUSED),
        (OSError(errno.EDQUOT, "x"), ExitCode.REFUSED),
        (OSError(errno.EMFILE, "x"), ExitCode.REFUSED),
        (caused_by(errno.EMFILE), ExitCode.REFUSED),
        (caused_by(errno.ENOMEM), ExitCode.REFUSED),
        (caused_by(errno.EIO), ExitCode.UNREADABLE),
        (StoreUnavailable("x"), ExitCode.REFUSED),
        (ReplicationError("x"), ExitCode.REFUSED),
        (CorruptFrame("p", 0, "x"), ExitCode.FINDINGS),
        (BadRow("p", "row", 1, "x"), ExitCode.FINDINGS),
        (MessageNotFound("x"), ExitCode.FINDINGS),
        (ValueError("x"), ExitCode.FAULT),
    ],
    ids=repr,
)
def test_the_code_of_an_error(error: Exception, code: ExitCode) -> None:
    assert exit_code(error) is code


def test_the_docs_list_each_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "command-line.md"
    codes = re.findall(r"^\| (\d+) \| ", page.read_text("utf-8"), re.MULTILINE)
    assert list(map(int, codes)) == list(ExitCode)


def test_codes_of_commands(damaged_store: Path, tmp_path: Path) -> None:
    run("info", damaged_store, code=0)
    run("verify", damaged_store, code=1)
    run("messages", damaged_store, "--offset", 3, code=1)
    run("messages", damaged_store, "--since", "never", code=2)
    run("info", tmp_path / "missing", code=3)
    with full_disk(damaged_store):
        run("salvage", damaged_store, "--into", tmp_path / "new", code=4)
    assert not (tmp_path / "new").exists()


_COMMANDS = (
    *("info {bad}", "messages {bad}", "verify {bad}", "verify {store} {bad}", "diff {store} {bad}"),
    *("recover {bad}", "rebuild {bad}", "rebuild {store} --into {bad}", "salvage {bad}"),
    *("salvage {store} --into {bad}", "retain {bad} --keep-bytes 1g", "convert {bad} --into x"),
    *("convert {store} --into {bad}", "export {bad} --to x --format jsonl"),
    *("export {store} --to {bad} --format jsonl", "export {store} --to {bad}", "import {bad} x"),
    *("import rows.jsonl {bad}", "compact {bad}", "stats {bad}", "report {bad} --html x"),
    *("report {store} --html {bad}", "serve-master {bad}", "replicate m:1 --into {bad}"),
    *("replicate m:1 --into x --tls --tls-ca {bad}", "serve-master {store} --tls-cert {bad}"),
    *("broker {bad}", "broker {store} --read-only --offsets {bad}", "broker --accounts {bad}"),
    *("demo --to {bad}", "bench put --dir {bad}", "info {store} --config {bad}"),
)


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_path_that_no_file_can_have(
    command: str, damaged_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"topic":"t","body":""}\n')
    before = sorted(tmp_path.iterdir())
    for bad in ("a\0b", "/a\ud800b", "s3://a/\0"):
        words = [word.format(bad=bad, store=damaged_store) for word in command.split()]
        error = run(*words, code=2).stderr
        assert error.startswith("error: ") and len(error.splitlines()) == 1, error
        reasons = ("null character", "surrogates not allowed", " URL", "only local", "only a local")
        assert any(reason in error for reason in reasons), error
    assert sorted(tmp_path.iterdir()) == before


def test_a_next_step_although_a_word_is_no_path(damaged_store: Path) -> None:
    wrong = damaged_store / "commitlog"
    error = run("messages", wrong, "--grep", "x" * 300 + "\0", "--limit", 1, code=3).stderr
    assert f"next: logquarry messages {damaged_store} --grep" in error


def test_a_file_of_another_user(damaged_store: Path) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with patch("os.scandir", side_effect=denied):
        result = run("verify", damaged_store, code=3)
    assert "cannot be read: Permission denied" in result.stderr
    assert result.stderr.splitlines()[-1] == (
        "next: become a user who may read the store's files, then: "
        f"logquarry verify {damaged_store}"
    )


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("words", ["verify STORE", "report STORE --html PAGE"])
def test_a_limit_of_the_process_is_no_fault_of_the_store(
    damaged_store: Path, tmp_path: Path, words: str, number: int
) -> None:
    names = {"STORE": damaged_store, "PAGE": tmp_path / "page.html"}
    arguments = [names.get(word, word) for word in words.split()]
    limit = OSError(number, os.strerror(number))
    with patch(
        "os.scandir" if words.startswith("verify") else "tempfile.mkstemp", side_effect=limit
    ):
        error = run(*arguments, code=4).stderr
    assert f"{os.strerror(number)}: {LIMITS[number]}\n" in error
    command = " ".join(map(str, arguments))
    assert error.splitlines()[-1] == f"next: do what the error says, then: logquarry {command}"


def test_a_full_disk_under_an_export(damaged_store: Path, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch("os.fsync", side_effect=full):
        result = run(
            *("export", damaged_store, "--to", tmp_path / "out.jsonl", "--format", "jsonl"),
            *("--on-damage", "skip"),
            code=4,
        )
    assert "next: free some space, then: logquarry export" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def exit_code_after(error: BaseException, store: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of `info STORE` if the command raises an error."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(outcome, "remember_words", fail)
    monkeypatch.setattr(sys, "argv", ["logquarry", "info", str(store)])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    for number, handler in before.items():
        signal.signal(number, handler)
    return ended.value.code


def test_a_fault_of_the_program_is_no_finding(
    damaged_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_after(ZeroDivisionError("a bug"), damaged_store, monkeypatch) == 70
    assert "Traceback" in (errors := capsys.readouterr().err)
    assert "a fault of logquarry itself: ZeroDivisionError('a bug')" in errors.splitlines()[-1]

    class PanicException(BaseException):
        """As an extension module in Rust raises it."""

    assert exit_code_after(PanicException("left == right"), damaged_store, monkeypatch) == 70


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_no_memory_is_no_fault_of_the_program(
    damaged_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    error.add_note("what the command left behind")
    assert exit_code_after(error, damaged_store, monkeypatch) == 4
    cause, note = capsys.readouterr().err.splitlines()
    assert "raise its limit (ulimit -v, ulimit -u" in cause
    assert note == "error: what the command left behind"


def unloaded(reason: str) -> Exception:
    """The error of NumPy's import if a shared library cannot be loaded."""
    error = ImportError("Importing the numpy C-extensions failed")
    error.__cause__ = ImportError(f"libgfortran.so.5: {reason}")
    return error


def test_no_memory_for_a_library_is_no_fault_of_the_program(
    damaged_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = unloaded("failed to map segment from shared object")
    assert exit_code_after(error, damaged_store, monkeypatch) == 4
    assert "raise its limit (ulimit -v, ulimit -u" in capsys.readouterr().err
    error = unloaded("invalid ELF header")
    assert exit_code_after(error, damaged_store, monkeypatch) == 70


WITHOUT_MEMORY = """
import resource, sys
from logquarry.cli import main, outcome

def fail(*_):
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, most))
    raise SystemError("error return without exception set")

class Destroyed:
    def __del__(self):
        import os
        os.kill(os.getpid(), 11)

at_exit = Destroyed()
outcome.remember_words = fail
sys.argv = ["logquarry", "info", "store"]
main.main()
"""


def test_a_crash_of_a_library_at_the_exit_does_not_replace_the_exit_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 4
    (line,) = ended.stderr.splitlines()
    assert "the process could not get more memory" in line


AT_IMPORT = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r} and self in sys.meta_path:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Interrupt())
sys.argv = ["logquarry", "verify", sys.argv[1]]
runpy.run_module("logquarry", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def many_messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with so many messages that verify imports numba."""
    root = tmp_path_factory.mktemp("many") / "store"
    with opened(root, mapped_file_size_commit_log=1 << 20) as store:
        for number in range(5_000):
            store.put(lq.Message("t", b"%d" % number))
    return root


@pytest.mark.parametrize(
    "name",
    ["click", "logquarry.cli.main", "logquarry.cli.check", "numpy", "numba.core", "llvmlite"],
)
def test_ctrl_c_during_an_import(name: str, many_messages: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT.format(name=name), str(many_messages)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "error: interrupted\n"
    assert done.returncode == 130


@pytest.mark.parametrize(
    ("name", "code", "line", "before"),
    [
        ("SIGINT", 130, "error: interrupted\n", ""),
        ("SIGTERM", 143, "error: ended by SIGTERM\n", ""),
        # The signal is raised again as SIGTERM.
        ("SIGHUP", 143, "error: ended by SIGTERM\n", ""),
        # A shell script starts its background jobs with SIGINT ignored.
        ("SIGTERM", 143, "error: ended by SIGTERM\n", "signal.signal(2, signal.SIG_IGN)\n"),
    ],
)
def test_a_signal_in_a_destructor_is_not_lost(
    many_messages: Path, name: str, code: int, line: str, before: str
) -> None:
    """Python ignores exceptions there; the exception is raised again at the next place."""
    script = AT_IMPORT.replace("class Interrupt", f"{before}class Interrupt").replace(
        "            os.kill(os.getpid(), signal.SIGINT)",
        "            class Dies:\n"
        "                def __del__(self):\n"
        f"                    os.kill(os.getpid(), signal.{name})\n"
        "                    sum(range(100))\n"
        "            made = Dies()\n"
        "            del made",
    )
    done = subprocess.run(
        [sys.executable, "-c", script.format(name="numba"), str(many_messages)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == line
    assert done.returncode == code


def test_a_caller_that_ignores_ctrl_c_stays_undisturbed(damaged_store: Path) -> None:
    """A shell starts its background jobs in this way."""
    code = AT_IMPORT.replace("class Interrupt", "signal.signal(2, signal.SIG_IGN)\nclass Interrupt")
    done = subprocess.run(
        [sys.executable, "-c", code.format(name="click"), str(damaged_store)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1 and b"interrupted" not in done.stderr


def test_hdfs_without_hadoop_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, "/nowhere")
    shown = run("messages", "hdfs://nowhere:9000/store", code=ExitCode.USAGE)
    assert len(shown.stderr.splitlines()) == 1
    assert shown.stderr.startswith("error: hdfs://nowhere:9000/store: ")
    assert "HDFS needs Hadoop's libraries" in shown.stderr


WITHOUT = """
import sys
from contextlib import nullcontext

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv[0] = "logquarry"
from logquarry.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("name", "step", "arguments"),
    [
        ("altair", "'logquarry[report]'", ["report", "STORE", "--html", "OUT"]),
        ("pyarrow", "pyarrow", ["report", "STORE", "--html", "OUT"]),
        ("pyarrow", "pyarrow", ["verify", "STORE"]),
        ("prometheus_client", "'logquarry[metrics]'", ["stats", "STORE", "--prometheus"]),
        ("fsspec", "'logquarry[remote]'", ["info", "zip://store"]),
    ],
)
def test_a_missing_package(
    name: str, step: str, arguments: list[str], damaged_store: Path, tmp_path: Path
) -> None:
    places = {"STORE": str(damaged_store), "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(name=name), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f": pip install {step}\n")
    assert done.returncode == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("report STORE --html DIR/page.html", "tempfile.mkstemp"),
        ("report STORE --html DIR/new/page.html", "pathlib.Path.mkdir"),
        ("export STORE --format jsonl --to DIR/out.jsonl --on-damage skip", "pathlib.Path.replace"),
        ("compact DIR", "logquarry.spark.output.OutputFolder.names"),
    ],
)
def test_an_output_that_the_user_may_not_write(
    damaged_store: Path, tmp_path: Path, words: str, call: str, number: int
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = words.replace("STORE", str(damaged_store)).replace("DIR", str(folder)).split()
    denied = OSError(number, os.strerror(number))
    with patch(call, side_effect=denied):
        error = run(*arguments, code=4).stderr
    where = arguments[1] if arguments[0] == "compact" else arguments[-1]
    if "--on-damage" in arguments:
        where = str(folder / "out.jsonl")
    assert f"error: {where}: {write_reason(denied)}\n" in error
    assert f"next: do what the error says, then: logquarry {' '.join(arguments)}\n" in error
    assert not list(folder.iterdir())


def test_a_folder_elsewhere_is_not_taken_for_the_output(tmp_path: Path) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/elsewhere")
    with pytest.raises(PermissionError, match="/elsewhere"), output.writing_to(tmp_path / "page"):
        raise denied


def test_a_demo_in_a_folder_that_the_user_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyarrow raises an error without a path.
    denied = PermissionError(errno.EACCES, "Cannot create directory 'out/parquet'")
    monkeypatch.setattr(with_spark, "session_if_installed", lambda _: nullcontext())
    monkeypatch.setattr(with_spark, "export", Mock(side_effect=denied))
    error = run("demo", "--to", tmp_path / "out", code=4).stderr
    assert f"error: {tmp_path}/out/parquet: Permission denied: use an account" in error


@pytest.mark.parametrize("words", ["salvage STORE --into DIR", "report STORE --html DIR"])
def test_an_output_in_a_folder_that_the_user_may_not_enter(
    damaged_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    names = {"STORE": damaged_store, "DIR": tmp_path / "closed" / "out"}
    arguments = [names.get(word, word) for word in words.split()]
    before = Path.is_dir

    def refuse(path: Path) -> bool:
        if path == names["DIR"]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return before(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_dir", refuse)
        error = run(*arguments, code=4).stderr
    assert f"error: {names['DIR']}: Permission denied: use an account that may write" in error
    assert error.splitlines()[-1].startswith("next: do what the error says, then: logquarry")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("info STORE --config FILE", ""),
        ("serve-master STORE --tls-cert FILE", "--tls-cert: "),
        ("broker STORE --tls-cert FILE", "--tls-cert: "),
    ],
)
def test_an_option_with_an_unreadable_file(damaged_store: Path, words: str, name: str) -> None:
    names = {"STORE": damaged_store, "FILE": damaged_store / "absent"}
    error = run(*(names.get(word, word) for word in words.split()), code=2).stderr
    assert error == f"error: {name}{names['FILE']}: cannot be read: No such file or directory\n"
