"""The thread that delivers delayed messages while a store is open (``ScheduleMessageService``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.health import Health
from logquarry.store.disk.service import Service, monotonic_ms
from logquarry.store.schedule.delivery import DelayedDelivery

logger = logging.getLogger(__name__)

_INTERVAL_MS: Final = 100
"""How often the queues are looked at (``DELAY_FOR_A_WHILE``). Not slept until the next message is
due: somebody may set the clock."""
_BETWEEN_SAVES: Final = 20_000
"""Most deliveries between two looks at whether progress is to be saved."""


class DeliveryService(Service):
    """Delivers what is due, and saves the progress now and then.

    Args:
        delivery: does it.
        health: of the store.
        clock: the time, in milliseconds.
        save_interval_ms: how often progress is saved.
        monotonic: the clock of that interval, likewise.
    """

    def __init__(
        self,
        delivery: DelayedDelivery,
        health: Health,
        *,
        clock: Callable[[], int],
        save_interval_ms: int,
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        super().__init__("delivery", health, interval_ms=_INTERVAL_MS)
        self._delivery = delivery
        self._clock = clock
        self._save_interval = save_interval_ms
        self._monotonic = monotonic
        self._save_at = monotonic() + save_interval_ms
        self._is_failing = False

    def run_once(self) -> None:
        """Deliver what is due."""
        try:
            while self._delivery.deliver(self._clock(), limit=_BETWEEN_SAVES):
                self._save_if_due()
                if self.is_stopping:
                    return
            self._save_if_due()
            self._is_failing = False
        except StoreUnavailable as error:
            self.health.require_writable()
            # A full disk, a busy one: the next look tries again.
            if not self._is_failing:
                logger.warning("delayed messages are not delivered now: %s", error)
            self._is_failing = True

    def _save_if_due(self) -> None:
        if self._monotonic() >= self._save_at:
            self._delivery.save()
            self._save_at = self._monotonic() + self._save_interval
