"""Draws a sample of mutants from src/logquarry and runs the tests that reach them.

Run from the project's root:

    python -m tools.mutation_sample record             which test reaches which line: once per tree
    python -m tools.mutation_sample run                200 mutants, seed 1, one at a time
    python -m tools.mutation_sample run -n 40 --group store=write --jobs 2
    python -m tools.mutation_sample show               the table of a run, and what survived

A mutant is a small change inside a function (tools/mutants.py). `run` runs the tests that reach the
mutant's line, the fastest first, until one fails or the time for the mutant is over. The mutant is
killed if a test fails, hangs or crashes; otherwise the mutant survives. A mutant that no test
reaches is counted separately. The same number of mutants is drawn from each group of packages. The
choice depends only on the seed and the source tree. Tests run in a copy of the tree, and an
interrupted `run` continues with the next mutant.

Tests run with the kernels on (functions that numba compiles), so a mutant of a kernel is compiled
too. With LOGQUARRY_KERNELS=off, no test would execute it. A second run with LOGQUARRY_KERNELS=off
is not needed: the twin tests compare each kernel with its pure-Python version (the reference), and
`record` knows which tests reach that version.

`record` does not see lines that run only in a child process or in Spark's workers. `record` omits
tests that are slow or need Spark, Java or root (choose other tests with `record --select`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from tools import reached_lines
from tools.mutants import Mutant, mutants_of

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = "src/logquarry"
_GROUPS: Final = {
    "store": ["store", "read", "write", "disk"],
    "repair": ["repair"],
    "format": ["format"],
    "spark": ["spark"],
}
_COMPILED: Final = "format/kernels/"
_QUICK: Final = "not slow and not java and not root and not cluster and not spark"
_TEST_SECONDS: Final = 60
_START_SECONDS: Final = 120
"""Seconds that pytest may take to start and to collect on a busy machine."""
_COMPILE_SECONDS: Final = 240
_KILLED: Final = ("killed", "timeout", "crash")


# -------------------------------------------------------------------------------------- the sample
def files_of(groups: Mapping[str, Sequence[str]], root: Path = ROOT) -> dict[str, list[str]]:
    """Return the files of each group.

    If a file is in the folders of two groups, it belongs to the group with the longer path.
    """
    homes = sorted(
        ((folder, name) for name, folders in groups.items() for folder in folders),
        key=lambda home: -len(home[0]),
    )
    found: dict[str, list[str]] = {name: [] for name in groups}
    for path in sorted((root / SOURCE).rglob("*.py")):
        inside = path.relative_to(root / SOURCE).as_posix()
        for folder, name in homes:
            if inside == folder or inside.startswith(f"{folder}/"):
                found[name].append(f"{SOURCE}/{inside}")
                break
    return found


def sample(groups: Mapping[str, Sequence[str]], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants, the same number from each group if the groups are large enough."""
    chosen: list[Mutant] = []
    for place, (name, files) in enumerate(files_of(groups).items()):
        share = count // len(groups) + (place < count % len(groups))
        every = [mutant for file in files for mutant in mutants_of(ROOT, file)]
        if not every:
            sys.exit(f"group {name}: no file of {', '.join(groups[name])} has code to change")
        chance = random.Random(f"{seed} {name}")
        chosen += chance.sample(every, min(share, len(every)))
    return chosen


def tree_hash(root: Path = ROOT) -> str:
    """Return a hash of source and tests.

    Results and records whose hash differs come from another tree, and are not valid for this one.
    """
    digest = hashlib.sha256()
    for folder in (SOURCE, "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------- which tests reach
@dataclass
class Record:
    """The results of `record` for some mutants."""

    seconds: dict[str, float] = field(default_factory=dict)
    by_line: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    by_function: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    by_kernel: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def read(cls, folder: Path, mutants: Iterable[Mutant]) -> Record:
        """Read the records in a folder, and keep only the lines that mutants change."""
        found = cls()
        wanted: dict[str, set[int]] = defaultdict(set)
        for mutant in mutants:
            lines = wanted[mutant.path.removeprefix(f"{SOURCE}/")]
            lines.update(range(mutant.line, mutant.end_line + 1))
        for file in sorted(folder.glob("*.jsonl")):
            with file.open(encoding="utf-8") as lines_of_file:
                for text in lines_of_file:
                    found._add(json.loads(text), wanted)
        return found

    def _add(self, document: dict[str, Any], wanted: Mapping[str, set[int]]) -> None:
        if not document["passed"]:
            return
        test = document["test"]
        self.seconds[test] = document["seconds"]
        for path in document["lines"].keys() & wanted.keys():
            for line in wanted[path].intersection(document["lines"][path]):
                self.by_line[path, line].add(test)
            for line in document["functions"][path]:
                self.by_function[path, line].add(test)
        for _, name in document["kernels"]:
            self.by_kernel[name].add(test)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach a mutant, the fastest first."""
        path = mutant.path.removeprefix(f"{SOURCE}/")
        if path.startswith(_COMPILED):
            tests = self._tests_of_kernel(mutant)
        else:
            lines = range(mutant.line, mutant.end_line + 1)
            tests = set().union(*(self.by_line.get((path, line), ()) for line in lines))
            # If no test is known for the line, take all tests of its function: `record` stops to
            # record a function early, so a test may have reached the line later.
            tests = tests or self.by_function.get((path, mutant.first_line), set())
        return sorted(tests, key=lambda test: (self.seconds[test], test))

    def _tests_of_kernel(self, mutant: Mutant) -> set[str]:
        """Return the tests that call a kernel that uses the function; if unknown, all tests of
        kernels.
        """
        name = mutant.function.rpartition(".")[2]
        callers = kernel_callers()
        users, known = {name}, set[str]()
        while users - known:
            new = users - known
            known |= new
            for one in new:
                users |= callers.get(one, set())
        found = set().union(*(self.by_kernel.get(user, ()) for user in users))
        return found or set().union(*self.by_kernel.values())


def kernel_callers(root: Path = ROOT) -> dict[str, set[str]]:
    """Return, for each function name, the names of the kernel functions whose code mentions it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in _compiled_files(root):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name):
                        found[inner.id].add(node.name)
                    elif isinstance(inner, ast.Attribute):
                        found[inner.attr].add(node.name)
    return found


def _compiled_files(root: Path) -> list[Path]:
    return [
        path
        for path in sorted((root / SOURCE / "format").rglob("*.py"))
        if path.relative_to(root / SOURCE).as_posix().startswith(_COMPILED)
    ]


# ------------------------------------------------------------------------------------------- a run
@dataclass
class Copy:
    """A copy of the tree, in which one mutant runs at a time.

    Attributes:
        root: folder of the copy.
        sound: for each test that has run without a mutant, whether it passed.
    """

    root: Path
    sound: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def make(cls, root: Path) -> Copy:
        """Copy the files that git tracks or could track, and the compiled kernels."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        names = [name for name in listed.stdout.split("\0") if name]
        cached = (ROOT / SOURCE / "format/kernels/__pycache__").glob("*.nb[ic]")
        names += [path.relative_to(ROOT).as_posix() for path in cached]
        for name in names:
            source, target = ROOT / name, root / name
            if source.is_file() and not source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                # Keep the modification time: numba compares it with the time in its cache.
                shutil.copy2(source, target)
        made = cls(root)
        code = "import logquarry; print(logquarry.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env=made.environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        if not Path(found).is_relative_to(root):
            sys.exit(f"tests in {root} would import {found}")
        return made

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that run the copy."""
        path = f"{self.root / 'src'}{os.pathsep}{self.root}"
        # Write no bytecode files: Python could otherwise use the bytecode of an earlier mutant for
        # this mutant.
        return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> dict[str, Any]:
        """Run the tests on a mutant.

        A test that kills the mutant must pass without the mutant. If the test fails without the
        mutant too (the copy lacks a file, or the machine is too busy), run the mutant again without
        the test.
        """
        tests = [test for test in tests if self.sound.get(test, True)]
        while True:
            result = self._run_changed(mutant, tests, seconds)
            test = result.get("by")
            if test is None:
                return result
            if test not in self.sound:
                alone = self._run([test], seconds, is_compiled=False)
                self.sound[test] = alone["status"] == "survived"
            if self.sound[test]:
                return result
            tests = [other for other in tests if other != test]
            if not tests:
                return {"status": "unreached", "seconds": result["seconds"], "reached_by": 0}

    def _run_changed(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> dict[str, Any]:
        """Change the file, run the tests, and restore the file."""
        target = self.root / mutant.path
        target.write_text(mutant.applied((ROOT / mutant.path).read_text("utf-8")), "utf-8")
        is_compiled = mutant.path.removeprefix(f"{SOURCE}/").startswith(_COMPILED)
        hidden = self._hide_compiled() if is_compiled else None
        try:
            limit = seconds + (_COMPILE_SECONDS if is_compiled else 0)
            return self._run(tests, limit, is_compiled=is_compiled)
        finally:
            shutil.copy2(ROOT / mutant.path, target)
            if hidden is not None:
                shutil.rmtree(self._kernel_cache, ignore_errors=True)
                hidden.rename(self._kernel_cache)

    @property
    def _kernel_cache(self) -> Path:
        return self.root / SOURCE / "format/kernels/__pycache__"

    def _hide_compiled(self) -> Path:
        """Make numba compile all kernels: numba does not know the callers of a changed kernel."""
        hidden = self.root / "kernels-of-the-tree"
        self._kernel_cache.mkdir(exist_ok=True)
        self._kernel_cache.rename(hidden)
        return hidden

    def _run(self, tests: Sequence[str], seconds: float, *, is_compiled: bool) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.root.parent) as temporary:
            choice, outcome = Path(temporary, "choice.json"), Path(temporary, "outcome.json")
            choice.write_text(json.dumps({"tests": tests, "seconds": seconds}), "utf-8")
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--no-header"]
            command += [
                "-p",
                "no:cacheprovider",
                "-p",
                "tools.reached_lines",
                "--hypothesis-seed=0",
            ]
            longest = _TEST_SECONDS + (_COMPILE_SECONDS if is_compiled else 0)
            command += [f"--timeout={longest}", f"--basetemp={temporary}/pytest", *files]
            began = time.monotonic()
            code = self._pytest(command, choice, outcome, seconds + longest + _START_SECONDS)
            took = round(time.monotonic() - began, 1)
            found = json.loads(outcome.read_text("utf-8")) if outcome.exists() else {}
        return _verdict(code, found) | {"seconds": took, "reached_by": len(tests)}

    def _pytest(
        self, command: Sequence[str], choice: Path, outcome: Path, seconds: float
    ) -> int | None:
        """Run pytest; return its exit code, or None if it exceeded the time limit."""
        environment = self.environment | {
            reached_lines.CHOICE: str(choice),
            reached_lines.OUTCOME: str(outcome),
            "LOGQUARRY_CACHE_DIR": str(choice.parent / "cache"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(choice.parent / "hypothesis"),
            "TMPDIR": str(choice.parent),
        }
        with (choice.parent / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # Also kill the processes that the tests have started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def record(folder: Path, select: str, jobs: int, tests: Sequence[str]) -> int:
    """Run the tests once and write which lines they reach.

    The tests run in a copy of the tree without compiled modules, because the lines of a compiled
    module cannot be recorded.
    """
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.reached_lines", "-m", select]
    command += ["--hypothesis-seed=0"]
    command += ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else ["-n", "0"]
    with tempfile.TemporaryDirectory(prefix="logquarry-record-") as temporary:
        tree = Copy.make(Path(temporary, "tree"))
        environment = tree.environment | {reached_lines.RECORD: str(folder)}
        done = subprocess.run([*command, *tests], cwd=tree.root, env=environment, check=False)
    # Accept exit code 1 (a test has failed): failed tests are only omitted in the record.
    if done.returncode not in (0, 1):
        print(f"pytest ended with {done.returncode}: the record is incomplete", file=sys.stderr)
        return 1
    (folder / "tree").write_text(tree_hash(), "utf-8")
    return 0


def _verdict(code: int | None, found: Mapping[str, Any]) -> dict[str, Any]:
    if code is None:
        return {"status": "timeout"}
    if found.get("failed"):
        return {"status": "killed", "by": found["failed"], "ran": found["ran"]}
    if code in (0, 2) and found.get("ran"):
        return {
            "status": "survived",
            "ran": found["ran"],
            "all_ran": found["ran"] == found["chosen"],
        }
    # Other exit codes also mean that the tests detected the change: pytest could not collect the
    # tests, the interpreter failed, or a signal ended the process.
    return {"status": "crash", "code": code}


@dataclass
class Run:
    """The results by mutant, stored in a file."""

    file: Path
    settings: dict[str, Any]
    results: dict[str, dict[str, Any]]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def load(cls, file: Path, settings: dict[str, Any]) -> Run:
        """Read earlier results, to continue the run; reject a file with other settings."""
        if not file.exists():
            return cls(file, settings, {})
        document = json.loads(file.read_text("utf-8"))
        if document["settings"] != settings:
            sys.exit(f"{file} holds a run of another tree or sample: name another file with --to")
        return cls(file, settings, document["mutants"])

    def add(self, mutant: Mutant, result: dict[str, Any]) -> None:
        """Add a result, and write the file."""
        with self.lock:
            self.results[mutant.name] = asdict(mutant) | result
            text = json.dumps({"settings": self.settings, "mutants": self.results}, indent=1)
            part = self.file.with_suffix(".part")
            part.write_text(text, "utf-8")
            part.replace(self.file)
            print(f"{len(self.results):>4} {result['status']:<9} {mutant.name}", flush=True)


def run(given: argparse.Namespace) -> int:
    """Run the mutants of a sample that have no result yet."""
    groups = _groups(given.group)
    mutants = sample(groups, given.n, given.seed)
    marked = given.record / "tree"
    if not marked.exists():
        sys.exit(f"{given.record} has no record: python -m tools.mutation_sample record")
    if marked.read_text("utf-8") != tree_hash():
        print("the record is of another tree: lines may have moved", file=sys.stderr)
    settings = {"seed": given.seed, "count": given.n, "groups": groups, "tree": tree_hash()}
    results = Run.load(given.to, settings)
    left = [mutant for mutant in mutants if mutant.name not in results.results]
    reached = Record.read(given.record, left)
    with tempfile.TemporaryDirectory(prefix="logquarry-mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(given.jobs):
            copies.put(Copy.make(Path(folder, f"copy-{number}", "tree")))

        def one(mutant: Mutant) -> None:
            tests = reached.tests_of(mutant)
            if not tests:
                results.add(mutant, {"status": "unreached", "seconds": 0.0, "reached_by": 0})
                return
            tree = copies.get()
            try:
                results.add(mutant, tree.run(mutant, tests, given.seconds))
            finally:
                copies.put(tree)

        with ThreadPoolExecutor(given.jobs) as pool:
            for done in [pool.submit(one, mutant) for mutant in left]:
                done.result()
    return show(given)


def show(given: argparse.Namespace) -> int:
    """Print the table of a run, and the mutants that were not killed."""
    document = json.loads(given.to.read_text("utf-8"))
    groups = files_of(document["settings"]["groups"])
    group_of = {file: name for name, files in groups.items() for file in files}
    counts: dict[str, Counter[str]] = {name: Counter() for name in [*groups, "all"]}
    seconds = 0.0
    for found in document["mutants"].values():
        seconds += found["seconds"]
        for name in (group_of.get(found["path"], "all"), "all"):
            counts[name][found["status"]] += 1
    print(f"\n| group | {' | '.join(_KILLED)} | survived | unreached | killed |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, count in counts.items():
        killed = sum(count[status] for status in _KILLED)
        share = f"{100 * killed / count.total():.1f} %" if count.total() else ""
        cells = [count[status] for status in (*_KILLED, "survived", "unreached")]
        print(f"| {name} | {' | '.join(map(str, cells))} | {share} |")
    print(f"\n{seconds:,.0f} seconds of runs, one after the other")
    for name, found in document["mutants"].items():
        if found["status"] not in _KILLED:
            print(f"\n{found['status']}: {name} in {found['function']}")
            print(f"  - {found['before']}\n  + {found['after']}")
    return 0


def _groups(given: Sequence[str] | None) -> dict[str, list[str]]:
    if given is None:
        groups = _GROUPS
    else:
        groups = {}
        for text in given:
            name, _, folders = text.partition("=")
            groups[name] = folders.split(",") if folders else [name]
    there = {
        name: [folder for folder in folders if (ROOT / SOURCE / folder).exists()]
        for name, folders in groups.items()
    }
    empty = [name for name, folders in there.items() if not folders]
    if empty:
        sys.exit(f"no such package in {SOURCE}: {', '.join(empty)}")
    return there


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``record``, ``run`` or ``show``."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation_sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="record which test reaches which line")
    recording.set_defaults(act=lambda g: record(g.record, g.select, g.jobs, g.tests))
    recording.add_argument("--select", default=_QUICK, help="expression for pytest -m")
    recording.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    recording.add_argument("tests", nargs="*", help="files and folders (default: all tests)")
    running = commands.add_parser("run", help="run the mutants of a sample")
    running.set_defaults(act=run)
    running.add_argument("-n", type=int, default=200, help="number of mutants (default: 200)")
    running.add_argument("--seed", type=int, default=1, help="chooses the mutants (default: 1)")
    running.add_argument(
        "--group",
        action="append",
        metavar="NAME=FOLDER,...",
        help=f"folders or files of {SOURCE}, several times (default: store, repair, format, spark)",
    )
    running.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    running.add_argument(
        "--seconds", type=float, default=120, help="for the tests of one mutant (default: 120)"
    )
    showing = commands.add_parser("show", help="print the results of a run")
    showing.set_defaults(act=show)
    for command in (recording, running):
        command.add_argument(
            "--record", type=Path, default=ROOT / ".mutation/lines", help="folder of the record"
        )
    for command in (running, showing):
        command.add_argument(
            "--to", type=Path, default=ROOT / ".mutation/results.json", help="file of the results"
        )
    given = parser.parse_args(arguments)
    code: int = given.act(given)
    return code


if __name__ == "__main__":
    sys.exit(main())
