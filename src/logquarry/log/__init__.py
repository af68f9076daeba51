"""The commit log on files: the store's layout, the walk over frames, and frames as columns."""
