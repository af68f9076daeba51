"""Transactions of RocketMQ 4.x: half messages, op messages, commits, and checks."""
