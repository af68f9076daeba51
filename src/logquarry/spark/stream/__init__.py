"""The streaming source without PySpark: offsets, limits and planning of batches."""
