"""Recovers a store after a crash: reads it, makes a plan, then applies the plan."""
