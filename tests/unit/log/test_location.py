"""Wrong levels of a path name the store nearby."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound, UsageError
from logquarry.log.location import (
    absolute,
    broker_names,
    find_stores,
    near_store,
    path_or_url,
    stores_by_name,
)
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


def test_the_host_of_a_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert path_or_url("file://localhost/data/x") == "/data/x"
    for url in ("file://other/data/x", "file://other/", "file://other"):
        with pytest.raises(UsageError, match="on the host other: write file:///PATH"):
            path_or_url(url)
    with pytest.raises(UsageError, match="on the host localhost: write file:///PATH"):
        path_or_url("file://localhost")
    assert path_or_url("file://./x") == "./x"
    (tmp_path / "other").mkdir()
    assert path_or_url("file://other/data/x") == "other/data/x"
    assert path_or_url("file://other") == "other"


def make_stores(root: Path, *names: str) -> None:
    for name in names:
        (root / name / "commitlog").mkdir(parents=True)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/data/broker-a"], ["broker-a"]),
        (["/a/s1", "/b/s2"], ["s1", "s2"]),
        (["/a/b1/store", "/a/b2/store"], ["b1", "b2"]),
        (["/a/b1/store", "/a/b2/store", "/c/other"], ["b1", "b2", "other"]),
        # The parents' names are equal, those of the grandparents are not.
        (["/x/data/store", "/y/data/store"], ["x", "y"]),
        # No single level tells all three apart.
        (
            ["/r1/b1/store", "/r1/b2/store", "/r2/b1/store"],
            ["r1/b1/store", "b2/store", "r2/b1/store"],
        ),
        # The better name already belongs to another store.
        (["/a/x/store", "/a/y/store", "/b/x"], ["x/store", "y", "b/x"]),
        (["s3://bucket/b1/store", "s3://bucket/b2/store/"], ["b1", "b2"]),
        (["/"], ["/"]),
    ],
)
def test_broker_names(paths: list[str], names: list[str]) -> None:
    assert broker_names(paths) == names
    assert len(set(names)) == len(names)


def test_a_store_twice() -> None:
    with pytest.raises(UsageError, match="/a/store is given twice"):
        broker_names(["/a/store", "/b", "/a/store/"])


def test_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("store/") == str(tmp_path / "store")
    assert absolute(Path("a/../b")) == str(tmp_path / "b")
    assert absolute("file:///a/b") == absolute("file:/a/b") == "/a/b"
    assert absolute("s3://bucket/a/") == "s3://bucket/a"
    with pytest.raises(UsageError):
        absolute("")


def test_globs_stand_for_stores(tmp_path: Path) -> None:
    make_stores(tmp_path, "b2/store", "b1/store", "c1/store", ".b3/store")
    (tmp_path / "b4" / "store").mkdir(parents=True)
    (tmp_path / "b5").write_text("no folder")
    found = find_stores([f"{tmp_path}/b*/store"])
    assert found == (f"{tmp_path}/b1/store", f"{tmp_path}/b2/store")
    assert find_stores([f"{tmp_path}/[bc]1/st?re"]) == (
        f"{tmp_path}/b1/store",
        f"{tmp_path}/c1/store",
    )
    assert find_stores([f"{tmp_path}/*/*/"])[0] == f"{tmp_path}/b1/store"


def test_each_store_once(tmp_path: Path) -> None:
    make_stores(tmp_path, "b1", "b2")
    found = find_stores([tmp_path / "b2", f"{tmp_path}/b*", str(tmp_path / "b1")])
    assert found == (f"{tmp_path}/b2", f"{tmp_path}/b1")


def test_a_store_and_links_to_it(tmp_path: Path) -> None:
    for name in ("b", "c"):
        (tmp_path / name / "commitlog").mkdir(parents=True)
    for name in ("a", "z"):
        (tmp_path / name).symlink_to(tmp_path / "b")
    stores = [str(tmp_path / "b"), str(tmp_path / "c")]
    assert list(find_stores([tmp_path / "*"])) == stores
    assert list(find_stores([tmp_path / "z", *stores])) == stores
    assert stores_by_name([tmp_path / "z", tmp_path / "*"]) == dict(zip("bc", stores, strict=True))
    links = (str(tmp_path / "z"), str(tmp_path / "a"))
    assert find_stores(links) == links[:1]
    assert stores_by_name(links) == {"z": links[0]}


def test_links_below_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk" / "b1" / "commitlog").mkdir(parents=True)
    (tmp_path / "disk" / "active").symlink_to("b1")
    (tmp_path / "data").symlink_to("disk")
    store = str(tmp_path / "data" / "b1")
    assert find_stores([tmp_path / "data" / "*"]) == (store,)
    assert stores_by_name([tmp_path / "data" / "*"]) == {"b1": store}


def test_a_path_with_wildcards_that_is_there(tmp_path: Path) -> None:
    make_stores(tmp_path, "b[1]", "b1")
    assert find_stores([tmp_path / "b[1]"]) == (f"{tmp_path}/b[1]",)


def test_a_path_need_not_be_there(tmp_path: Path) -> None:
    assert find_stores([tmp_path / "nowhere"]) == (f"{tmp_path}/nowhere",)


@pytest.mark.parametrize("pattern", ["*", "no*/store", "nowhere/*/store"])
def test_globs_that_match_nothing(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(StoreNotFound, match="matches no store"):
        find_stores([tmp_path / pattern])


@pytest.mark.parametrize("url", ["s3://buck*/store", "s3://*", "s3://b?cket/a*", "gs://b[12]/*/c"])
def test_a_wildcard_in_the_name_of_a_bucket(url: str) -> None:
    with pytest.raises(UsageError, match="the name of the bucket or host has a wildcard"):
        find_stores([url])


def test_no_locations() -> None:
    with pytest.raises(UsageError):
        find_stores([])
