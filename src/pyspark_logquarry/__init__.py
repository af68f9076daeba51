"""Prevents a traceback that PySpark prints from the process in which it looks for data sources.

That process prints the traceback when the JVM closes the idle connection after a minute. The only
way to change the process is a package named ``pyspark_*``: the process imports all such packages.
This package defines no ``DefaultSource``. With one, ``logquarry.spark.register`` would fail,
because PySpark registers a source only once.
"""

from logquarry.spark.worker import ignore_hang_ups

ignore_hang_ups()
