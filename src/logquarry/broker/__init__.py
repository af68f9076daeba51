"""A broker for RocketMQ's clients on a store: :class:`Broker`, or in a thread :func:`background`.

docs/broker-requests.md lists the requests that it answers.
"""

from __future__ import annotations

from logquarry.broker.broker import Broker, background
from logquarry.broker.options import BrokerOptions

__all__ = ["Broker", "BrokerOptions", "background"]
