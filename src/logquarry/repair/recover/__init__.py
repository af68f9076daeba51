"""Recovers a store after a crash, either safely (by logquarry's rules) or exactly as RocketMQ
does.
"""
