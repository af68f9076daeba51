"""The command line ``logquarry``: its commands, and the options and output that they share.

The modules of this package import NumPy, Arrow, Spark and rich only inside functions, so that
``--help`` and short commands start fast.
"""
