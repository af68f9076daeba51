"""Exports stores to Delta and Iceberg tables; Spark needs no packages for these formats.

The workers write uniquely named Parquet files into the table's folder. The driver commits the files
in one transaction, which also stores the table's "marks": the physical offset of each store up to
which the table has its messages. So a crash at any point neither loses nor duplicates messages.
"""
