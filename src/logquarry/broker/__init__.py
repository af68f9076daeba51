"""A broker for RocketMQ's clients on a store: start with :class:`Broker`.

See docs/broker.md for what it serves.
"""

from __future__ import annotations

from logquarry.broker.broker import Broker
from logquarry.broker.options import BrokerOptions

__all__ = ["Broker", "BrokerOptions"]
