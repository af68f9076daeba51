"""Makes mutants of Python source: small changes that a good test should detect.

Only code inside functions is changed. Statements of a module or class run once, when a test process
imports the module, so they cannot be assigned to a test. Annotations, decorators, defaults,
docstrings, f-strings and calls of a logger do not change.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: the file, relative to the project's root.
        function: qualified name of the changed function.
        first_line: first line of the function, including its decorators.
        operator: kind of the change.
        line: first line of the changed code.
        column: byte at which the changed code begins in ``line``.
        end_line: last line of the changed code.
        end_column: byte after the changed code in ``end_line``.
        before: the old code.
        after: the new code.
    """

    path: str
    function: str
    first_line: int
    operator: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """The mutant's name, unique in one source tree."""
        return f"{self.path}:{self.line}:{self.column} {self.operator}"

    def applied(self, source: str) -> str:
        """Return the source of the file with the change.

        Raises:
            ValueError: if `source` differs from the text from which the mutant was made.
        """
        data = source.encode()
        starts = [0]
        for line in data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        begin = starts[self.line - 1] + self.column
        end = starts[self.end_line - 1] + self.end_column
        if data[begin:end] != self.before.encode():
            raise ValueError(f"{self.name}: the file has changed since the sample was drawn")
        return (data[:begin] + self.after.encode() + data[end:]).decode()


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    source = (root / path).read_text("utf-8")
    found = list(_Finder(path, source).mutants())
    return sorted(found, key=lambda m: (m.line, m.column, m.end_line, m.end_column, m.operator))


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._source = source
        self._tree = ast.parse(source)

    def mutants(self) -> Iterator[Mutant]:
        yield from self._of_body(self._tree.body, "")

    def _of_body(self, body: list[ast.stmt], prefix: str) -> Iterator[Mutant]:
        """Yield the mutants of all functions of a module or class."""
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from self._of_body(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, _FUNCTIONS):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                for statement in _without_docstring(node.body):
                    yield from self._of_node(statement, f"{prefix}{node.name}", first)

    def _of_node(
        self, node: ast.AST, function: str, first: int, *, is_test: bool = False
    ) -> Iterator[Mutant]:
        if _is_left_alone(node):
            return
        changes = list(_changes(node))
        if is_test and isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            changes.append(("negation", f"not ({ast.unparse(node)})"))
        for operator, changed in changes:
            before = ast.get_source_segment(self._source, node)
            after = ast.unparse(changed) if not isinstance(changed, str) else changed
            if before is None or not isinstance(node, ast.expr | ast.stmt):
                continue
            if isinstance(node, ast.expr):
                after = f"({after})"
            if "\n" in after or node.end_lineno is None or node.end_col_offset is None:
                continue
            yield Mutant(
                self._path,
                function,
                first,
                operator,
                node.lineno,
                node.col_offset,
                node.end_lineno,
                node.end_col_offset,
                before,
                after,
            )
        test = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else None
        for child in _children(node):
            yield from self._of_node(child, function, first, is_test=child is test)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return [statement for statement in body if not _is_text(statement)]


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return True
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("logger.")
    ) or _is_text(node)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that may be changed."""
    if isinstance(node, _FUNCTIONS | ast.ClassDef):
        yield from _without_docstring(node.body)
        return
    skipped = {id(node.annotation)} if isinstance(node, ast.AnnAssign) else set()
    for child in ast.iter_child_nodes(node):
        if id(child) not in skipped:
            yield child


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            other = _COMPARISONS.get(type(operator))
            if other is not None:
                changed = copy.deepcopy(node)
                changed.ops[place] = other()
                yield f"comparison{place or ''}", changed
    elif isinstance(node, ast.BoolOp):
        changed_bool = copy.deepcopy(node)
        changed_bool.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "and-or", changed_bool
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.BinOp) and not _is_text_operation(node):
        arithmetic = _ARITHMETIC.get(type(node.op))
        if arithmetic is not None:
            changed_arithmetic = copy.deepcopy(node)
            changed_arithmetic.op = arithmetic()
            yield "arithmetic", changed_arithmetic
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "boolean", ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return):
        value = node.value
        if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", "return None"
    elif isinstance(node, ast.AugAssign):
        yield "statement", "pass"
        augmented = _ARITHMETIC.get(type(node.op))
        if augmented is not None:
            changed_augmented = copy.deepcopy(node)
            changed_augmented.op = augmented()
            yield "arithmetic", changed_augmented
    elif isinstance(node, ast.Raise | ast.Continue | ast.Break) or _is_deletable(node):
        yield "statement", "pass"


def _is_deletable(node: ast.AST) -> bool:
    """Whether a mutant may delete a statement.

    It may if the statement is a call whose result is unused, or an assignment to an attribute or
    item.
    """
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return False


def _is_text_operation(node: ast.BinOp) -> bool:
    """Whether a node formats or joins texts.

    Such a node is not changed, because its mutants would raise TypeError in every test.
    """
    for side in (node.left, node.right):
        if isinstance(side, ast.JoinedStr):
            return True
        if isinstance(side, ast.Constant) and isinstance(side.value, str | bytes):
            return True
    return False
