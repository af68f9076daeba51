"""Stores into tables of a lakehouse: Delta and Iceberg, without their JVM packages.

    table       what an export wants of a table, and what it tells one
    delta       a Delta table, through the package deltalake
    iceberg     an Iceberg table, through the package pyiceberg
    runs        what an export that died has left behind
    write       a task: messages into Parquet files of the table
    identity    what an export puts into a table, kept in the table
    advance     from one commit to the next: backfill, then follow
    export      what users call
    compact     small files into larger ones

The workers write Parquet files where they stay, under names that nobody else uses. They are no
part of the table until the driver commits them, all at once and together with the offsets up to
which the stores are in the table then. So nothing is lost or doubled, wherever an export dies.
"""
