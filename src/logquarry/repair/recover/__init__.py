"""Recovers a store after a crash, by logquarry's safe rules or by RocketMQ's own rules."""
