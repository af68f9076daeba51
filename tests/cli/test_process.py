"""The command as a process: exit codes, stdout and stderr, signals, pipes, start-up, locale.

Most of a test's time goes into the start of an interpreter. One case of each kind runs as a
process; the others run the same command line in this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from logquarry.cli import main as cli_main
from logquarry.cli import spark as with_spark
from logquarry.cli.main import app
from logquarry.testing.builder import fill
from tests.helpers.command import run
from tests.helpers.hostile_store import EVIL_TOPIC
from tests.helpers.imports import SETTINGS, line, write

COMMAND = [sys.executable, "-c", "from logquarry.cli.main import main; main()"]


def call(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def larger_store(tmp_path: Path) -> Path:
    """A store whose output is larger than a pipe's buffer."""
    fill(tmp_path / "larger", count=3_000, file_size=1 << 20)
    return tmp_path / "larger"


def test_clean(golden: Path) -> None:
    result = call("verify", golden / "single" / "store", "--json")
    assert result.returncode == 0 and not result.stderr
    assert not [f for f in json.loads(result.stdout)["findings"] if f["severity"] == "damage"]


def test_findings(golden: Path) -> None:
    store = golden / "unclean" / "crc-middle" / "store"
    result = call("verify", store, "--json")
    assert result.returncode == 1 and not result.stderr
    assert "bad_body_crc" in [f["kind"] for f in json.loads(result.stdout)["findings"]]
    result = call("messages", store, "--jsonl")
    assert result.returncode == 1
    assert all(json.loads(line) for line in result.stdout.splitlines())
    assert result.stderr.startswith("error: ")


USAGE_ERRORS = [
    ["nothing"],
    ["info"],
    ["info", ".", "--what"],
    ["messages", ".", "--since", "never"],
    ["export", ".", "--to", "x", "--format", "delta", "--decode", "xml"],
    ["export", ".", "--to", "x", "--format", "iceberg", "--table", "messages"],
    ["export", ".", "--to", "x", "--follow"],
    ["export", ".", "--to", "x", "--format", "jsonl", "--partition-by", "topic"],
    ["bench", "scan", "--size", "much"],
    ["bench", "scan", "--body", "9-1"],
    ["report", "."],
]


@pytest.mark.parametrize("arguments", USAGE_ERRORS)
def test_usage(arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert not result.stdout and result.stderr


@pytest.mark.parametrize("arguments", [["nothing"], ["messages", ".", "--since", "never"]])
def test_usage_of_a_process(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.returncode == 2
    assert not result.stdout and result.stderr


@pytest.mark.parametrize("command", ["info", "messages", "verify"])
def test_unreadable(command: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        here = run(command, path, code=3)
        assert not here.stdout and str(path) in here.stderr
    run("export", tmp_path, "--to", tmp_path / "out", "--format", "jsonl", code=3)
    assert not (tmp_path / "out").exists()


def test_unreadable_to_a_process(tmp_path: Path) -> None:
    result = call("info", tmp_path)
    assert result.returncode == 3
    assert not result.stdout and str(tmp_path) in result.stderr


def test_help_and_version() -> None:
    result = call("--help")
    assert result.returncode == 0
    for command in ("info", "messages", "verify", "export", "report", "demo", "bench"):
        assert f"  {command} " in result.stdout
        run(command, "--help")
    assert call("info", "--help").returncode == 0
    version = CliRunner().invoke(app, ["--version"], prog_name="logquarry")
    assert version.exit_code == 0 and version.stdout.startswith("logquarry ")
    assert call("--version").stdout == version.stdout


def test_no_colour_and_no_bars_off_a_terminal(golden: Path) -> None:
    result = call("info", golden / "real-broker" / "store", "--exact", env={"FORCE_COLOR": "1"})
    assert "\x1b" not in result.stdout + result.stderr


def test_closed_pipe_is_no_error(larger_store: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "messages", str(larger_store), "--jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0
    process.stderr.close()


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "error: interrupted\n"),
        (signal.SIGTERM, 143, "error: ended by SIGTERM\n"),
        (signal.SIGHUP, 129, "error: ended by SIGHUP\n"),
    ],
    ids=["int", "term", "hup"],
)
def test_signals(larger_store: Path, number: signal.Signals, code: int, line: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "export", str(larger_store), "--to", "-", "--format", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # After its first line the command waits for a reader of its output.
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors.decode() == line


def test_a_command_may_open_many_files(tmp_path: Path) -> None:
    """The limit of open files is often 1,024, although the user may raise it much higher."""
    resource = pytest.importorskip("resource")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    rows = write(tmp_path / "rows.jsonl", *(line(topic=f"t{n}") for n in range(60)))
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    done = subprocess.run(
        [*COMMAND, "import", rows, tmp_path / "new", "--config", tmp_path / "config.json"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard)),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("first", "code", "line"),
    [
        # If a terminal closes, the shell and the system each send SIGHUP.
        ("SIGHUP", 129, "error: ended by SIGHUP\n"),
        # With SendSIGHUP, systemd sends SIGHUP after SIGTERM.
        ("SIGTERM", 143, "error: ended by SIGTERM\n"),
        ("SIGINT", 130, "error: interrupted\n"),
    ],
)
def test_a_later_sighup_does_not_disturb_the_cleanup(
    tmp_path: Path, first: str, code: int, line: str
) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from logquarry.cli import interrupts, main as cli\n"
        "def read(*_, **__):\n"
        "    try: os.kill(os.getpid(), getattr(signal, sys.argv.pop()))\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        Path(sys.argv[2]).touch()\n"
        "cli.outcome.remember_words = read\n"
        "interrupts.end_at_once()\n"
        "cli.main()"
    )
    done = tmp_path / "done"
    result = subprocess.run(
        [sys.executable, "-c", script, "info", str(done), first],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (code, line)
    assert done.exists()


def test_nohup_keeps_a_command_running(small_store: Path) -> None:
    script = "trap '' HUP; exec \"$@\""
    begun = (
        "import os, signal; os.kill(os.getpid(), signal.SIGHUP)\n"
        "from logquarry.cli import main as cli\n"
        "remember = cli.outcome.remember_words\n"
        "def interrupted(*words):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    return remember(*words)\n"
        "cli.outcome.remember_words = interrupted\n"
        "cli.main()"
    )
    result = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", begun, "info", str(small_store)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_an_interrupt_during_the_first_import() -> None:
    script = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'logquarry.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from logquarry.__main__ import main"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (130, b"error: interrupted\n")


def test_quick_commands_import_little(golden: Path) -> None:
    script = (
        "import sys; sys.argv = ['logquarry', 'info', sys.argv[1]]\n"
        "from logquarry.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numba', 'pyarrow', 'pyspark', 'rich', 'pandas', 'altair', 'asyncio'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(golden / "real-broker" / "store")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


LOCALE_COMMANDS = """
import sys
from logquarry.cli.main import main
store = sys.argv[1]
for arguments in (
    ["messages", store, "--jsonl", "--limit", "1"],
    ["messages", store, "--jsonl", "--offset", "0"],
    ["info", store, "--json"],
):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_json_is_utf_8_whatever_the_locale(small_store: Path, locale: str) -> None:
    # Without coercion to UTF-8, as on a machine without C.UTF-8.
    env = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env["PYTHONIOENCODING"] = "latin-1"
    store = small_store.rename(small_store.with_name("größe"))
    command = [sys.executable, "-c", LOCALE_COMMANDS, str(store)]
    output = subprocess.run(command, capture_output=True, check=True, env=env).stdout
    *lines, rest = output.split(b"\n", 2)
    found = [json.loads(line.decode("utf-8")) for line in lines]
    assert [message["properties"]["city"] for message in found] == ["Zürich"] * 2
    assert [message["broker"] for message in found] == ["größe"] * 2
    document = json.loads(rest.decode("ascii"))
    assert document["broker"] == "größe"
    assert EVIL_TOPIC in [topic["topic"] for topic in document["topics"]]


# ------------------------------------------------------------------- a stream that takes no output
def ended(*arguments: object, **streams: object) -> int:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, timeout=120, check=False, **streams).returncode  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def damaged_store(larger_store: Path) -> Path:
    """A store with more findings than a pipe's buffer has room for."""
    for path in (larger_store / "consumequeue").rglob("0*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            for at in range(0, len(data), 40):
                data[at + 19] ^= 1
            path.write_bytes(data)
    return larger_store


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_a_stream(damaged_store: Path, tmp_path: Path) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with Path("/dev/full").open("w") as full:
        # The exit code stays that of the error, also if the error cannot be printed.
        assert ended("info", tmp_path / "none", **(quiet | {"stderr": full})) == 3
        assert ended("unknown", **(quiet | {"stderr": full})) == 2
        assert ended("verify", damaged_store, **(quiet | {"stderr": full})) == 1
        for words in (
            ["verify", damaged_store],
            ["info", damaged_store],
            ["messages", damaged_store],
        ):
            assert ended(*words, **(quiet | {"stdout": full})) == 4
            assert ended(*words, stdout=full, stderr=full) == 4
        shown = subprocess.run(
            [*COMMAND, "info", str(damaged_store)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert shown.stderr.splitlines() == [
        "error: standard output: No space left on device",
        f"next: free some space, then: logquarry info {damaged_store}",
    ]


def test_an_interrupt_repeats_no_output() -> None:
    program = (
        "import signal, sys\n"
        "from logquarry.cli.main import _checked\n"
        "sys.stdout = _checked(sys.stdout, 'standard output')\n"
        "number = 0\n"
        "while True:\n"
        "    print('\\n'.join(f'{number + i:09d}' for i in range(512)))\n"
        "    number += 512\n"
    )
    for size in range(1_000, 9_000, 400):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert process.stdout is not None
        with process.stdout as pipe:
            # The interrupt arrives while the write waits, because the pipe is full.
            read = bytearray()
            while len(read) < 100_000:
                read += pipe.read(size)
            process.send_signal(signal.SIGINT)
            while data := pipe.read(1 << 16):
                read += data
        assert process.wait(60)
        numbers = [int(line) for line in read.decode().split("\n")[:-1]]
        assert numbers == list(range(len(numbers)))


def test_python_can_be_told_not_to_buffer() -> None:
    program = (
        "import os, sys\n"
        "from logquarry.cli.main import _checked\n"
        "sys.stdout = _checked(sys.stdout, 'standard output')\n"
        "print('line')\n"
        "os._exit(0)\n"
    )
    assert subprocess.check_output([sys.executable, "-u", "-c", program]) == b"line\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_damage_stays_the_exit_code_if_the_pipe_is_closed(
    damaged_store: Path, options: list[str]
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "verify", str(damaged_store), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 1
    process.stderr.close()


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_onto_a_full_disk(word: str) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("the system has no device that is always full")
    with full.open("wb") as stdout:
        done = subprocess.run(
            [*COMMAND, word], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (
        4,
        "error: standard output: No space left on device\n",
    )


def test_a_result_that_cannot_be_printed(small_store: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no device that is always full")
    (small_store / "abort").touch()
    new = tmp_path / "new"
    for words in (["recover", small_store, "--apply"], ["salvage", small_store, "--into", new]):
        with Path("/dev/full").open("wb") as stdout:
            done = subprocess.run(
                [*COMMAND, *map(str, words)],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert (done.returncode, done.stderr.splitlines()[-2:]) == (
            4,
            [
                "error: standard output: No space left on device",
                "error: the command has done its work, and only its output is missing",
            ],
        )
    assert not (small_store / "abort").exists()
    assert call("verify", new).returncode == 0


def test_a_full_device_is_named(larger_store: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no device that is always full")
    done = call("report", larger_store, "--html", "/dev/full")
    assert done.returncode == 4
    assert "error: /dev/full: No space left on device" in done.stderr


def test_a_user_without_an_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container can run with a user id that is not in /etc/passwd."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("HOME", "XDG_CACHE_HOME", "LOGQUARRY_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    cli_main._give_home()
    assert Path(os.environ["HOME"]).parent == tmp_path
    assert Path(os.environ["HOME"]).stat().st_mode & 0o077 == 0


def test_spark_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed(Exception):
        __module__ = "pyspark.errors"

    def missing(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", missing)
    match = r"The user id [0-9]+ has no entry in /etc/passwd"
    with pytest.raises(with_spark.SparkTrouble, match=match), with_spark._spark_trouble():
        raise Failed("[JAVA_GATEWAY_EXITED]")
