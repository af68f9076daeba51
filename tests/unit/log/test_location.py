"""Wrong levels of a path name the store nearby."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound, UsageError
from logquarry.log.location import near_store, path_or_url
from logquarry.testing.builder import fill


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    """The home of a broker, with its store."""
    fill(tmp_path / "home/store", count=3, file_size=1 << 12)
    return tmp_path / "home"


@pytest.mark.parametrize(
    "wrong",
    [
        ".",
        "store/commitlog",
        "store/commitlog/00000000000000000000",
        "store/consumequeue",
        "store/index",
        "store/config",
    ],
)
@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_wrong_level(broker: Path, wrong: str, mode: str) -> None:
    if mode == "rw" and not (broker / wrong).exists():
        pytest.skip("a writer may make a store in a new folder")
    with pytest.raises(StoreNotFound, match=f"Did you mean {broker}/store") as caught:
        lq.MessageStore.open(broker / wrong, mode=mode)  # type: ignore[call-overload]
    assert caught.value.suggestion == (str(broker / wrong), f"{broker}/store")


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_home_that_no_shell_replaced(
    broker: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(broker))
    monkeypatch.chdir(broker)
    with pytest.raises(StoreNotFound, match=f"Did you mean {broker}/store"):
        lq.MessageStore.open("~/store", mode=mode)  # type: ignore[call-overload]
    assert not (broker / "~").exists()


def test_two_stores_are_no_suggestion(broker: Path) -> None:
    (broker / "store").rename(broker / "a")
    assert near_store(str(broker)) == str(broker / "a")
    fill(broker / "b", count=1, file_size=1 << 12)
    assert near_store(str(broker)) is None
    assert near_store("s3://bucket/store/commitlog") is None


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("s3a:bucket", "s3a://bucket"),
        ("hdfs:/host:9000/path", "hdfs://host:9000/path"),
        ("HTTPS:/host/x", "HTTPS://host/x"),
    ],
)
def test_a_url_that_lacks_a_slash(url: str, right: str) -> None:
    with pytest.raises(UsageError, match=f"two slashes after its scheme: {right}$"):
        path_or_url(url)


@pytest.mark.parametrize("local", ["C:/store", "a:b", "./s3:/x", "s3/x", "hdfs"])
def test_a_path_with_a_colon(local: str) -> None:
    assert path_or_url(local) == local


def test_a_folder_whose_name_is_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s3:").mkdir()
    monkeypatch.chdir(tmp_path)
    assert path_or_url("s3:/x") == "s3:/x"


@pytest.mark.parametrize("url", ["file:/data/x", "file:///data/x", "file:data/x"])
def test_a_file_url_needs_no_slashes(url: str) -> None:
    assert path_or_url(url).lstrip("/") == "data/x"
