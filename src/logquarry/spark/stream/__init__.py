"""The streaming source without PySpark; `logquarry.spark.source` is its side to Spark.

admission    offsets of a stream, and the end of each batch
planner      offsets and tasks of the batches of one query
"""
