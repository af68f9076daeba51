"""Hypothesis strategies for damage to the files of a store."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

MAGICS = (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab", b"\xcb\xd4\x31\x94")
SIZES = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x5b", b"\x80\0\0\0")


@st.composite
def damaged(
    draw: st.DrawFn, files: Mapping[str, bytes], *, most: int = 3, whole_files: bool = True
) -> dict[str, bytes]:
    """The same files with up to ``most`` injuries; ``whole_files``: also whole files."""
    result = dict(files)
    names = sorted(files)
    for _ in range(draw(st.integers(0, most))):
        name = draw(st.sampled_from(names))
        data = bytearray(result.get(name, b""))
        kinds = ["bit", "zeros", "magic", "size", "garbage", "copy", "cut"]
        if whole_files and name in result:
            kinds += ["gone", "empty"]
        kind = draw(st.sampled_from(kinds))
        if kind == "gone":
            if len(result) > 1:
                del result[name]
            continue
        if kind == "empty":
            data.clear()
        if not data or name not in result:
            result[name] = bytes(data)
            continue
        at = draw(st.integers(0, len(data) - 1))
        if kind == "bit":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        else:
            patch = draw(_patches(kind, bytes(data)))
            data[at : at + len(patch)] = patch[: len(data) - at]
        result[name] = bytes(data)
    return result


def _patches(kind: str, data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes that overwrite a place."""
    if kind == "zeros":
        return st.integers(1, 400).map(bytes)
    if kind == "magic":
        return st.sampled_from(MAGICS)
    if kind == "size":
        return st.sampled_from(SIZES)
    if kind == "copy":
        return st.integers(1, len(data)).map(lambda length: data[:length])
    return st.binary(min_size=1, max_size=24)
