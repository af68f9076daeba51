"""The package for one store that is open for reading or for writing.

The module ``message_store`` opens a store. The modules ``reads``, ``reader`` and ``writer`` have
the methods of an open store. ``store_engine`` creates the parts of a writer (appender, dispatcher,
flush service) and connects them. Each of these subjects has its own folder: consumers, delivery of
delayed messages, transactions, retention and loads.
"""
