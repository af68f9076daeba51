"""The streaming source without PySpark: offsets, limits and planning of batches.

admission    offsets of a stream, and the end of each batch
planner      offsets and tasks of the batches of one query
"""
