"""The HTML page of ``logquarry report``.

``survey`` counts messages in one scan of the log. ``charts`` and ``drawing`` make charts with
Altair. ``page`` writes charts and tables into one HTML file that needs no network. The charts need
the packages of ``logquarry[report]``.
"""
