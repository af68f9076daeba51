"""What all decoders are: a body becomes a value of an Arrow type, or a reason why not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import pyarrow as pa

_LONGEST_REASON: Final = 500


class BodyDecoder(ABC):
    """Decodes bodies. Picklable: what is not, is made anew in the worker.

    Attributes:
        arrow_type: the struct that bodies become.
    """

    arrow_type: pa.DataType

    @abstractmethod
    def value(self, body: bytes) -> Any:
        """One body as :func:`pyarrow.array` takes it for the type.

        Raises:
            Exception: any, if it does not decode.
        """

    def field(self, name: str) -> pa.Field:
        """The column of that name."""
        return pa.field(name, self.arrow_type)

    def decode(self, bodies: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """A column of bodies as one of values.

        Returns:
            The values, null where a body does not decode; and by its row the reason.
        """
        values: list[Any] = []
        failed: dict[int, str] = {}
        for row, body in enumerate(bodies.to_pylist()):
            try:
                values.append(self.value(body or b""))
            except Exception as error:
                # Libraries raise what they like on bytes that nobody has made for them.
                failed[row] = reason(error)
                values.append(None)
        try:
            return pa.array(values, self.arrow_type), failed
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            return self._singly(values, failed), failed

    def _singly(self, values: list[Any], failed: dict[int, str]) -> pa.Array:
        """The values that the type can hold; the others fail."""
        for row, value in enumerate(values):
            try:
                pa.array([value], self.arrow_type)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                failed[row] = reason(error)
                values[row] = None
        return pa.array(values, self.arrow_type)


class NotOfTheSchema(ValueError):
    """A value is none of its column's type."""


def reason(error: BaseException) -> str:
    """What an exception says, for the dead letters."""
    text = str(error).encode("utf-8", "replace").decode("utf-8")
    if not isinstance(error, NotOfTheSchema):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:_LONGEST_REASON]
