"""The command line ``logquarry``: the commands, and the options and output that they share.

Modules here import NumPy, Arrow, Spark and rich only inside functions, so that ``--help`` and short
commands start fast.
"""
