"""Exports stores to Delta and Iceberg tables; Spark needs no packages for these formats.

    table the interface of a table, and the document in it that describes the export
    delta       a Delta table, with the package deltalake
    iceberg     an Iceberg table, with the package pyiceberg
    write writes the files of one task, and removes the files of exports that crashed
    advance     the steps of an export: plan, write, commit
    export      the export functions, on Spark

The workers write Parquet files directly into the table's folder, under unique names. The driver
commits the files to the table in one transaction. The same transaction stores the "marks": for each
store, the physical offset up to which its messages are in the table. So a crash at any point
neither loses nor duplicates messages.
"""
