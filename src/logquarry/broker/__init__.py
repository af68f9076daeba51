"""The broker for RocketMQ's clients. docs/broker-requests.md lists the requests that it answers."""

from __future__ import annotations

from logquarry.broker.broker import Broker, background
from logquarry.broker.options import BrokerOptions

__all__ = ["Broker", "BrokerOptions", "background"]
