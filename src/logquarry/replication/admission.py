"""Who may connect to us, and who was refused."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence

from logquarry.errors import UsageError

logger = logging.getLogger(__name__)

Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def networks(allow: Sequence[str] | None) -> Networks | None:
    """Addresses and networks ("10.0.0.7", "10.0.0.0/8") as such; None for whoever comes.

    Raises:
        UsageError: if one is none.
    """
    if allow is None:
        return None
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in allow)
    except ValueError as error:
        raise UsageError(f"allow: {error}") from error


class Admission:
    """Tells who may connect, and notes who was refused. For one thread.

    Args:
        allowed: who may; None for whoever comes.
        now_ms: the time, by a clock that nobody sets.

    Attributes:
        refused: how many were.
    """

    def __init__(self, allowed: Networks | None, now_ms: Callable[[], int]) -> None:
        self._allowed = allowed
        self._now_ms = now_ms
        self._noted_ms: int | None = None
        self.refused = 0

    def allows(self, host: str) -> bool:
        """Whether an address may connect."""
        if self._allowed is None:
            return True
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._allowed)

    def refuse(self, peer: str, reason: str) -> None:
        """Note that somebody was."""
        self.refused += 1
        # Whoever knocks all day is not to fill a disk with it.
        now = self._now_ms()
        if self._noted_ms is None or now - self._noted_ms >= 1_000:
            self._noted_ms = now
            logger.warning("%s was refused: %s (%d so far)", peer, reason, self.refused)
