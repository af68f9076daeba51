"""The layouts of RocketMQ 4.9.3's files, and their codecs, which work on bytes only.

This package opens no file, reads no clock and knows no store. Each format has one table
(:mod:`logquarry.format.fields`) from which structs, offsets and dtypes derive.
"""
