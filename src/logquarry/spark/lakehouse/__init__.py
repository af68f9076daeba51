"""Exports stores to Delta and Iceberg tables; Spark needs no packages for these formats.

The workers write uniquely named Parquet files into the table's folder. The driver commits the files
in one transaction, which also updates the table's marks. A mark is the physical offset up to which
the table has the messages of one store. A crash at any point neither loses nor duplicates messages.
"""
