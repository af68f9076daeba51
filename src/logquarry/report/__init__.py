"""The HTML page of ``logquarry report``.

``survey`` scans the log once for counts, ``charts`` and ``drawing`` make charts with Altair, and
``page`` puts charts and tables into one file that needs no network. Charts need the packages of
``logquarry[report]``.
"""
