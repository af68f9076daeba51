"""The streaming source without PySpark: offsets, admission and planning of batches.

admission    offsets of a stream, and how much of the log each batch takes
planner      offsets and tasks of the batches of one query
"""
