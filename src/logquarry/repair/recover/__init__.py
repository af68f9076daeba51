"""Recovers a store after a crash: checks it, makes a plan, and applies the plan.

The recovery mode decides whether this follows logquarry's safe rules or RocketMQ's own rules.
"""
