"""Recovers a store after a crash: safely, by logquarry's rules, or exactly as RocketMQ does."""
