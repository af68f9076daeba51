"""JSON documents of dataclasses: members, their order, and nested values."""

from __future__ import annotations

from dataclasses import dataclass

from logquarry.text import document


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Named:
    number: int

    def to_json(self) -> dict[str, int]:
        return {"the_number": self.number}


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    named: Named
    table: dict[str, Inner]

    @property
    def count(self) -> int:
        return len(self.many)


OUTER = Outer(Inner(1), (Inner(2, "b"), Inner(3)), Named(4), {"x": Inner(5)})


def test_fields_are_members_in_their_order() -> None:
    found = document(OUTER)
    assert list(found) == ["inner", "many", "named", "table"]
    assert found == {
        "inner": {"number": 1, "text": None},
        "many": [{"number": 2, "text": "b"}, {"number": 3, "text": None}],
        "named": {"the_number": 4},
        "table": {"x": {"number": 5, "text": None}},
    }


def test_names_choose_members_and_their_order() -> None:
    assert document(OUTER, ("count", "inner")) == {
        "count": 2,
        "inner": {"number": 1, "text": None},
    }
    assert list(document(OUTER, ("count", "inner"))) == ["count", "inner"]
