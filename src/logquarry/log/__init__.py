"""The commit log in bulk: the files of a store, the walk over frames, filters, Arrow columns."""
