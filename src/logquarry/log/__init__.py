"""The commit log on files: the files of a store, the walk over frames, columns."""
