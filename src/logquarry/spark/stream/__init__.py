"""The streaming source without PySpark; `logquarry.spark.source` is its side to Spark.

admission    offsets of a stream, and how much of the log each batch takes
planner      offsets and tasks of the batches of one query
"""
