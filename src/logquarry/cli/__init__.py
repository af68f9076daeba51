"""The command ``logquarry``: one module a command, and what they share.

Nothing here imports NumPy, Arrow, Spark or rich when it is imported: a command imports what it
needs once it runs, so that help and quick answers stay quick.
"""
