"""Serves Spark Connect on a loopback port that the system chooses, until stdin ends; prints it."""

from __future__ import annotations

import sys
from typing import Any

from tests.spark.quick_start import SMALL_QUERIES

SETTINGS = {
    **SMALL_QUERIES,
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def main() -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    jvm: Any = spark._jvm
    service = getattr(jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    print(getattr(service, "MODULE$").localPort(), flush=True)
    sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main()
