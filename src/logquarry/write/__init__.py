"""Everything that writes messages: puts, the frames in the log, flushes, and the dispatch to
consume queues and index.
"""
