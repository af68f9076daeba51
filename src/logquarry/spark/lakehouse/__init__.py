"""Exports stores to Delta and Iceberg tables; Spark needs no packages for these formats.

The workers write uniquely named Parquet files into the table's folder. The driver adds these files
to the table in one transaction. The transaction also updates the table's marks: for each store, the
physical offset up to which the table has the store's messages. The next export reads each log from
its mark on, so a crash at any point neither loses nor duplicates messages.
"""
