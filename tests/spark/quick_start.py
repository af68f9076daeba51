"""Settings with which Spark starts sooner, and ends small queries sooner."""

# The processes live for some minutes on two cores: the JVM's optimizing compiler would only cost
# time. Without the verification of Spark's own classes, the JVM starts a fifth sooner.
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
QUICK_START = f"{SHORT_LIVED} -XX:+UseSerialGC"

SMALL_QUERIES = {
    # By default, a streaming aggregation keeps 200 state stores, one per partition.
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": QUICK_START,
    # Queries have a few hundred rows: to compile Java for each query takes longer than to run it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
