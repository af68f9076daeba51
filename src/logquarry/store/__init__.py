"""The package for one store that is open for reading or for writing.

``message_store`` opens a store; ``reads``, ``reader`` and ``writer`` have the methods.
``store_engine`` creates the parts of a writer (appender, dispatcher, flush service) and connects
them. Each of these subjects has its own folder: consumers, delivery of delayed messages,
transactions, retention and loads.
"""
