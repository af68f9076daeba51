"""Converts the hosts in frames from and to text, and makes and parses message ids
(``MessageDecoder.createMessageId``).

The message id is the address (4 or 16 bytes), port (4) and physical offset (8) in upper-case hex.
"""

from __future__ import annotations

import ipaddress
import struct

from logquarry.errors import UsageError

_PORT = struct.Struct(">i")
_OFFSET = struct.Struct(">q")

HOST_SIZE_V4 = 8
HOST_SIZE_V6 = 20
ID_LENGTH_V4 = 2 * (HOST_SIZE_V4 + 8)
ID_LENGTH_V6 = 2 * (HOST_SIZE_V6 + 8)

_MAPPED_V4 = bytes(10) + b"\xff\xff"


def host_text(data: bytes) -> str:
    """Format a host: 8 bytes as ``ip:port``, 20 bytes as ``[ip]:port`` (``getHostAddress``).

    As in Java, the text of an IPv6 address has all eight groups, and an IPv4-mapped address is
    written as an IPv4 address.
    """
    address, port = data[:-4], _PORT.unpack(data[-4:])[0]
    if len(address) == 16:
        if not address.startswith(_MAPPED_V4):
            groups = struct.unpack(">8H", address)
            return f"[{':'.join(format(group, 'x') for group in groups)}]:{port}"
        address = address[12:]
    return f"{'.'.join(map(str, address))}:{port}"


def host_bytes(text: str) -> bytes:
    """Parse ``ip:port`` (IPv4) to 8 bytes, or ``[ip]:port`` (IPv6) to 20 bytes, as they are in a
    frame.
    """
    address, separator, port = text.rpartition(":")
    try:
        if not separator:
            raise ValueError("no port")
        if address.startswith("[") and address.endswith("]"):
            address = address[1:-1]
        packed = ipaddress.ip_address(address).packed
        return packed + _PORT.pack(int(port))
    except (ValueError, struct.error) as error:
        raise UsageError(f"not a host and port: {text!r} ({error})") from error


def encode(store_host: bytes, physical_offset: int) -> str:
    """Make the message id from STOREHOSTADDRESS and the physical offset."""
    return (store_host + _OFFSET.pack(physical_offset)).hex().upper()


def decode(message_id: str) -> tuple[str, int]:
    """Return the store host and the physical offset in a message id."""
    if len(message_id) not in (ID_LENGTH_V4, ID_LENGTH_V6):
        raise UsageError(
            f"not a message id: {message_id!r} has {len(message_id)} characters, "
            f"not {ID_LENGTH_V4} or {ID_LENGTH_V6}"
        )
    try:
        data = bytes.fromhex(message_id)
    except ValueError as error:
        raise UsageError(f"not a message id: {message_id!r} is not hex") from error
    if len(data) * 2 != len(message_id):
        raise UsageError(f"not a message id: {message_id!r} is not hex")
    return host_text(data[:-8]), _OFFSET.unpack(data[-8:])[0]
