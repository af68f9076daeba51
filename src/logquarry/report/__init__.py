"""The HTML page of ``logquarry report``. Its charts need the package Altair
(``logquarry[report]``).
"""
