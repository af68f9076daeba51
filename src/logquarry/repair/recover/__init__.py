"""Recovers a store after a crash: check at opening, plan, apply; also by RocketMQ's own rules."""
