"""The streaming source, apart from what PySpark wants of it.

    offsets      how far a stream has read, as Spark keeps it
    admission    how much of the log one batch takes
    planner      the stores of a stream, asked for offsets and tasks again and again

Knows nothing of Spark: `logquarry.spark.stream.reader` is what Spark calls.
"""
