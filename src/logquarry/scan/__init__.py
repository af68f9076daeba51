"""Reading the log in bulk: walk the chain of frames, cut it into splits, turn it into Arrow.

Everything here works on a :class:`~logquarry.files.layout.StoreLayout` and needs neither a store
object nor Spark.
"""
