"""Silences a traceback of the process in which PySpark looks for data sources.

PySpark imports all packages named ``pyspark_*`` in that process, and only such an import can change
the process. When the JVM closes the idle connection after a minute, the process prints a traceback.
The package defines no ``DefaultSource``: otherwise ``logquarry.spark.register`` would fail, because
PySpark registers a source only once.
"""

from logquarry.spark.worker import ignore_hang_ups

ignore_hang_ups()
