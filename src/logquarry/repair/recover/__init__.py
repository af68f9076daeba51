"""Recovers a store after a crash, by safe rules or by RocketMQ's: checks, plans and applies."""
