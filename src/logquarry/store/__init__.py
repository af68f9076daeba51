"""One store, open for reading or writing: the classes that users call, and their parts.

``message_store`` opens a store; ``reads``, ``reader`` and ``writer`` have the methods.
``store_engine`` creates and connects the writer's parts. Consumers, delivery, transactions,
retention and loads have their own folders.
"""
