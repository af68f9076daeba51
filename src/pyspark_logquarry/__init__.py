"""Silences tracebacks in the process in which PySpark looks for data sources.

PySpark imports all packages named ``pyspark_*`` there. The process then idles as long as the
session lives, and prints a traceback when the JVM closes its connection after a minute; this import
is the only way to prevent that. The package offers no ``DefaultSource``: PySpark does not register
a source again that it found here, so ``logquarry.spark.register`` would fail.
"""

from logquarry.spark.worker import ignore_hang_ups

ignore_hang_ups()
