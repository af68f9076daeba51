"""Do errors say where and what, and survive the way from a Spark worker to the driver?"""

from __future__ import annotations

import errno
import os
import pickle
import sys

import pytest

from logquarry import errors


@pytest.mark.parametrize("kind", [errors.CorruptStore, errors.CorruptFrame, errors.CorruptFile])
def test_damage_survives_pickling(kind: type[errors.CorruptStore]) -> None:
    error = kind("/store/commitlog/0", 17, "the body", kind="bad_body_crc")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.path, again.offset, again.reason, again.kind) == (
        *("/store/commitlog/0", 17, "the body", "bad_body_crc"),
    )
    assert str(again) == str(error) == "/store/commitlog/0: at offset 17: the body"


def test_the_tree() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.MessageNotFound, LookupError)
    assert issubclass(errors.DecompressionError, ValueError)
    assert not issubclass(errors.StoreNotFound, OSError)
    every = [value for value in vars(errors).values() if isinstance(value, type)]
    for kind in every:
        assert not issubclass(kind, Exception) or issubclass(kind, errors.LogquarryError)


def test_a_rejected_message_carries_its_status() -> None:
    error = errors.MessageRejected("too large", status="MESSAGE_ILLEGAL", reason="too_large")
    assert (error.status, error.reason) == ("MESSAGE_ILLEGAL", "too_large")


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (errno.ENODEV, "copy the store to another file system"),
        (errno.ESTALE, "mount the network file system again"),
    ],
)
def test_errors_of_a_file_system_name_the_next_step(code: int, step: str) -> None:
    error = OSError(code, os.strerror(code))
    assert errors.reason_of(error).endswith(step)
    assert errors.write_reason(error).endswith(step)


@pytest.mark.parametrize("platform", ["linux", "darwin", "freebsd14", "win32"])
def test_the_attributes_of_a_file_are_named_on_linux(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    """Other systems have no lsattr and no chattr."""
    monkeypatch.setattr(sys, "platform", platform)
    error = PermissionError(errno.EPERM, "Operation not permitted")
    reason = errors.write_reason(error)
    assert reason.startswith("Operation not permitted: use an account that may write there")
    assert ("lsattr" in reason) is ("chattr" in reason) is (platform == "linux")
    assert "attr" not in errors.write_reason(PermissionError(errno.EACCES, "Permission denied"))
