"""The files of a store that is open for writing, and the writer's disk calls, syncs, locks and
threads.
"""
