# %% [markdown]
# # A stream to an aggregate
#
# A Spark stream follows a store that a program writes, and counts the orders of each state, as a
# dashboard would. Run this page as `python examples/stream_to_aggregate.py` (needs
# `logquarry[spark]`); it writes into the folder `example-stream`.

# %%
import shutil
from pathlib import Path

import logquarry as lq
from logquarry.spark import get_session

# Give Spark a full path, because Spark's processes start in other folders.
home = Path("example-stream").absolute()
shutil.rmtree(home, ignore_errors=True)
store = home / "store"


def put_orders(writer: lq.StoreWriter, numbers: range) -> None:
    for n in numbers:
        writer.put(lq.Message("orders", b"{}", tags="paid" if n % 3 else "open", keys=f"order-{n}"))
    writer.wait_dispatched()


# %% [markdown]
# ## The stream
#
# The checkpoint holds the offsets: a stream that stops continues where it was, and no message
# counts twice.


# %%
def count_by_state() -> dict[str, int]:
    spark = get_session(master="local[2]")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    query = (
        spark.readStream.format("rocketmq")
        .option("topics", "orders")
        .load(str(store))
        .groupBy("tags")
        .count()
        .writeStream.outputMode("complete")
        .format("memory")
        .queryName("dashboard")
        .option("checkpointLocation", str(home / "checkpoint"))
        # A dashboard omits this line, so that the stream runs until the user stops the program.
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return {row["tags"]: row["count"] for row in spark.table("dashboard").collect()}


# %% [markdown]
# ## Write, count, write more, count again

# %%
with lq.MessageStore.open(store, mode="rw") as writer:
    put_orders(writer, range(300))
    first = count_by_state()
    put_orders(writer, range(300, 900))
    second = count_by_state()
print(first, second)
assert first == {"paid": 200, "open": 100}
assert second == {"paid": 600, "open": 300}
