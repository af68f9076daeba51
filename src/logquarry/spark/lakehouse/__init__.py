"""Exports stores to Delta and Iceberg tables, without Spark packages for them.

    table       the interface of a table, and the document that an export keeps in it
    delta       a Delta table, with the package deltalake
    iceberg     an Iceberg table, with the package pyiceberg
    write       writes the files of one task, and removes those that a crash left behind
    advance     the steps of an export: plan, write, commit
    export      the export functions, on Spark

The workers write Parquet files at their final place, under unique names. The driver commits them to
the table in one transaction, together with the offsets up to which the stores are in the table (the
"marks"). So a crash at any point neither loses nor duplicates messages.
"""
