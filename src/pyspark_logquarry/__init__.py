"""Loaded by PySpark, in the process that looks for data sources among packages of such names.

That process is of no other use, lives as long as the session, and prints a traceback when the JVM
closes its connection after an idle minute. There is no other way to tell it not to. It offers no
``DefaultSource``: a source that was found here could not be registered again by
``logquarry.spark.register``.
"""

from logquarry.spark.worker import let_hang_up

let_hang_up()
