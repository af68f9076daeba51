"""The layouts of RocketMQ 4.9.3's files, and functions that encode and decode them. The functions
work on bytes only; they open no files.

One table of fields (:mod:`logquarry.format.fields`) describes each format. The structs, field
offsets and NumPy dtypes of the format are computed from this table.
"""
