"""The thread that checks transactions (``TransactionalMessageCheckService``)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.health import Health
from logquarry.store.disk.service import Service

logger = logging.getLogger(__name__)


class TransactionCheckService(Service):
    """Checks at an interval; the first time after one.

    Args:
        check: does it.
        health: of the store.
        interval_ms: the pause.
    """

    def __init__(self, check: Callable[[], object], health: Health, *, interval_ms: int) -> None:
        super().__init__("transaction-check", health, interval_ms=interval_ms)
        self._check = check

    def run_once(self) -> None:
        """Check."""
        try:
            self._check()
        except StoreUnavailable as error:
            self.health.require_writable()
            logger.warning("transactions could not be checked: %s", error)
