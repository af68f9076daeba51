"""What ``serve-master`` and ``replicate`` share: addresses, TLS, and going on until told to end."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from logquarry.cli.output import Output
from logquarry.errors import UsageError
from logquarry.signals import Held

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.protocol.ha import HaTimes

_LOOK_EVERY: Final = 0.2


def host_port(text: str, *, option: str) -> tuple[str, int]:
    """``127.0.0.1:10912`` or ``[::1]:10912`` in two.

    Raises:
        UsageError: if it is not.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and _is_host(host) and port.isascii() and port.isdigit()) or int(port) > 0xFFFF:
        raise UsageError(f"{option} takes HOST:PORT, not {text!r}")
    return host, int(port)


def _is_host(name: str) -> bool:
    try:
        # What the system is asked for. Of a name that has no such form it fails otherwise.
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def ha_times(settings: StoreConfig) -> HaTimes:
    """Heartbeats and housekeeping, as a configuration asks for them.

    Raises:
        UsageError: if it cannot be meant.
    """
    from logquarry.protocol.ha import HaTimes

    return HaTimes(
        heartbeat_ms=settings.ha_send_heartbeat_interval,
        housekeeping_ms=settings.ha_housekeeping_interval,
    )


def server_tls(
    certificate: str | None, key: str | None, authority: str | None
) -> ssl.SSLContext | None:
    """How a master serves TLS; None where no certificate is given.

    Raises:
        UsageError: if the files cannot be used.
    """
    if certificate is None:
        if key is not None or authority is not None:
            raise UsageError("--tls-key and --tls-ca say more of --tls-cert, which is not there")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise UsageError(f"TLS: {error}") from error
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(
    is_wanted: bool, authority: str | None, certificate: str | None, key: str | None
) -> ssl.SSLContext | None:
    """How a slave connects by TLS; None where it does not.

    Raises:
        UsageError: if the files cannot be used.
    """
    if not is_wanted:
        if authority or certificate or key:
            raise UsageError("--tls-ca, --tls-cert and --tls-key say more of --tls")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise UsageError(f"TLS: {error}") from error
    return context


def go_on(out: Output, waiting: Held, line: Callable[[], str | None]) -> None:
    """Show a status line until an interrupt comes.

    Args:
        out: where it is shown.
        waiting: what has interrupts wait.
        line: gives the line; None to end.
    """
    with out.status_line() as shown:
        while (words := line()) is not None:
            shown.show(words)
            time.sleep(_LOOK_EVERY)
            waiting.check()
