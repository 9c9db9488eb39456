"""Small mistakes that can be planted in a source file, each a replacement of a stretch of its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "zeros": "ones", "searchsorted": "digitize"}
"""Names of functions and methods that are taken for each other."""
UNSEEN = ("phases.", "logger.", "warnings.", "print", "gc.", "cast")
"""Beginnings of calls whose result nobody tests: times, messages, hints."""


@dataclass(frozen=True)
class Mutant:
    """One replacement in one file."""

    path: str
    line: int
    begin: int
    """Offset of the replaced text in the file's UTF-8, in bytes."""
    end: int
    kind: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """Return a file's text with the mistake in it."""
        return source[: self.begin] + self.after.encode() + source[self.end :]

    def described(self, source: bytes) -> str:
        """Return the place, and the line before and after."""
        mutated = self.applied(source)
        first = source.rfind(b"\n", 0, self.begin) + 1
        before = source[first : source.find(b"\n", self.end)].decode().strip()
        after = mutated[first : mutated.find(b"\n", self.begin + len(self.after.encode()))].decode().strip()
        return f"{self.path}:{self.line} {self.kind}\n      - {_short(before)}\n      + {_short(after)}"


def mutants(path: Path, name: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    source = path.read_bytes()
    return sorted(_Finder(name, source).found(), key=lambda mutant: (mutant.begin, mutant.end, mutant.after))


def _short(text: str) -> str:
    """Return the text in one line of at most 160 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:157] + "..."


class _Finder:
    """The mutants of one file."""

    def __init__(self, name: str, source: bytes) -> None:
        self.name = name
        self.source = source
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        """Yield the mutants of all functions; constants, annotations, and text of messages are left as they are."""
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                for statement in body:
                    yield from self._statement(statement)

    def _statement(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the mutants of a statement and what it contains; nested functions are found by themselves."""
        if isinstance(node, (ast.FunctionDef, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Lambda)):
            return
        yield from self._mutants(node)
        for field, child in ast.iter_fields(node):
            if field in ("annotation", "decorator_list", "returns", "exc", "cause", "msg"):
                continue
            for item in child if isinstance(child, list) else [child]:
                if isinstance(item, ast.AST) and not self._is_message(item):
                    yield from self._statement(item)

    @staticmethod
    def _is_message(node: ast.AST) -> bool:
        """Return whether the node is a call whose effect no test can see."""
        call = node.value if isinstance(node, ast.Expr) else node
        return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(UNSEEN)

    def _mutants(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the mutants of this node alone."""
        match node:
            case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
                yield self._between(node.left, right, "comparison", COMPARISONS[type(operator)])
            case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_text(node):
                yield self._between(node.left, node.right, "operator", OPERATORS[type(operator)])
            case ast.BoolOp(op=operator, values=[first, second, *_]):
                yield self._between(first, second, "boolean", "or" if isinstance(operator, ast.And) else "and")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replaced(node, "not", self._text(operand))
            case ast.Constant(value=bool() as value):
                yield self._replaced(node, "constant", str(not value))
            case ast.Constant(value=int() as value):
                yield self._replaced(node, "constant", str(value + 1))
            case ast.While(orelse=[]) if not _leaves_loop(node):
                yield self._at(self._offset(node), self._offset(node) + 5, node.lineno, "while", "if")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield self._replaced(test, "condition", "True")
                yield self._replaced(test, "condition", "False")
            case ast.Break():
                yield self._replaced(node, "break", "continue")
            case ast.Continue():
                yield self._replaced(node, "continue", "break")
            case ast.Call(func=ast.Name(id=name) as function) if name in CALLS:
                yield self._replaced(function, "call", CALLS[name])
            case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in CALLS:
                end = self._end(node.func)
                yield self._at(end - len(name), end, node.lineno, "call", CALLS[name])
            case ast.Expr(value=ast.Call() | ast.Yield()) | ast.AugAssign() | ast.Raise() | ast.Delete():
                yield self._replaced(node, "dropped", "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._replaced(node, "dropped", "pass")
        if (
            isinstance(node, ast.Call)
            and len(node.args) >= 2
            and not any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        ):
            first, second = node.args[:2]
            if self._text(first) != self._text(second):
                between = self.source[self._end(first) : self._offset(second)].decode()
                swapped = self._text(second) + between + self._text(first)
                yield self._at(self._offset(first), self._end(second), node.lineno, "swapped", swapped)

    def _between(self, left: ast.expr, right: ast.expr, kind: str, after: str) -> Mutant:
        """Replace the operator between two expressions; brackets around them stay."""
        begin, end = self._end(left), self._offset(right)
        gap = self.source[begin:end]
        opened, closed = gap.count(b"("), gap.count(b")")
        return self._at(begin, end, left.end_lineno or left.lineno, kind, ")" * closed + f" {after} " + "(" * opened)

    def _replaced(self, node: ast.expr | ast.stmt, kind: str, after: str) -> Mutant:
        return self._at(self._offset(node), self._end(node), node.lineno, kind, after)

    def _at(self, begin: int, end: int, line: int, kind: str, after: str) -> Mutant:
        return Mutant(self.name, line, begin, end, kind, after)

    def _text(self, node: ast.expr) -> str:
        return self.source[self._offset(node) : self._end(node)].decode()

    def _offset(self, node: ast.expr | ast.stmt) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset


def _is_text(node: ast.BinOp) -> bool:
    """Return whether an operand is written as text."""
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _leaves_loop(node: ast.While) -> bool:
    """Return whether the loop holds a break or continue, which an if could not."""
    return any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node))
