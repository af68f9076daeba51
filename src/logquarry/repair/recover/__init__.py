"""Recovers a store after a crash: check at opening, plan, apply; and RocketMQ's own rules."""
