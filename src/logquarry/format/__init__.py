"""The layouts of RocketMQ 4.9.3's files, and their codecs, which work only on bytes.

Each format has one table (:mod:`logquarry.format.fields`); structs, offsets and dtypes derive from
the table.
"""
