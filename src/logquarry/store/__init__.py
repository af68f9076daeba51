"""One store, open for reading or writing: the classes that users call, and their parts.

``message_store`` opens a store; ``reads``, ``reader`` and ``writer`` have the methods. The writer's
parts are put together in ``store_engine``. Consumers, delivery, transactions, retention and loads
have folders of their own.
"""
