"""The HTML page of ``logquarry report``, with charts that Altair makes (``logquarry[report]``)."""
