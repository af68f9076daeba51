"""Bytes only: the layouts of RocketMQ 4.9.3's files and the codecs over them.

Nothing here opens a file, asks a clock or knows a store. Each format has one table
(:mod:`logquarry.format.fields`) from which structs, offsets and dtypes are derived.
"""
