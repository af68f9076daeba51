"""Transactions as RocketMQ 4.x has them: half messages, op messages, commits, checks."""
