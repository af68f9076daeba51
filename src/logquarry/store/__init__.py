"""One store, open for reading or writing: what users call, and the parts behind it.

``message_store`` opens a store; ``reads``, ``reader`` and ``writer`` have the methods. The writer's
parts are put together in ``store_engine``. Consumers, delivery, transactions, retention and loads
have folders of their own.
"""
