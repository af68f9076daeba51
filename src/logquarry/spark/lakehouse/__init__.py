"""Exports stores to Delta and Iceberg tables; Spark needs no packages for these formats.

The workers write uniquely named Parquet files into the table's folder. The driver adds these files
to the table in one transaction. The transaction also updates the table's marks. The mark of a store
is a physical offset. The table has all messages of the store that are before this offset. The next
export reads each log from its mark on, so a crash at any point neither loses nor duplicates
messages.
"""
