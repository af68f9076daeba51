"""One offline HTML page about a store, from a few small tables.

``survey`` walks the log once and counts, ``charts`` draws the counts with Altair, ``page`` puts
charts and tables into one file that needs no network. Charts need the extra
``logquarry[report]``.
"""
