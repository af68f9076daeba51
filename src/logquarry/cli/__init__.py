"""The command line ``logquarry``.

The modules import NumPy, Arrow, Spark and rich only inside functions, so that ``--help`` and short
commands start fast.
"""
