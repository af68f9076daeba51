# %% [markdown]
# # From a store to Delta and SQL
#
# A store becomes a Delta table, and DuckDB queries it. A second export adds only new messages. Run
# this page as `python examples/store_to_delta.py` (it needs `logquarry[spark,lakehouse]` and
# `duckdb`); it writes into the folder `example-delta`.

# %%
import json
import shutil
from pathlib import Path

import duckdb
from deltalake import DeltaTable

import logquarry as lq
from logquarry.spark import export_delta, get_session

home = Path("example-delta")
shutil.rmtree(home, ignore_errors=True)
store, table = home / "broker-a", home / "orders"


def put_orders(numbers: range) -> None:
    with lq.MessageStore.open(store, mode="rw") as writer:
        writer.put_many(
            lq.Message(
                "orders",
                json.dumps({"order": n, "cents": 100 * n}).encode(),
                queue_id=n % 4,
                tags="paid" if n % 3 else "open",
                keys=f"order-{n}",
            )
            for n in numbers
        )


put_orders(range(1_000))

# %% [markdown]
# ## Export
#
# On a terminal: `logquarry export example-delta/broker-a --format delta --to example-delta/orders`.

# %%
spark = get_session(master="local[2]")
export_delta(spark, str(store), str(table), {"topics": "orders"})

# %% [markdown]
# ## Query
#
# Any engine that knows Delta can read the table. The body of a message is bytes: decode it as JSON.


# %%
def totals() -> list[tuple[str, int, int]]:
    orders = DeltaTable(str(table)).to_pyarrow_dataset()  # noqa: F841  DuckDB finds it by its name
    return duckdb.sql(
        """
        SELECT tags, count(*)::INT, sum((decode(body)::JSON->>'cents')::INT)::INT
        FROM orders GROUP BY tags ORDER BY tags
        """
    ).fetchall()


print(totals())
assert sum(count for _, count, _ in totals()) == 1_000

# %% [markdown]
# ## Export again
#
# The table remembers how far the log was read, so the next export adds each new message once.

# %%
put_orders(range(1_000, 1_500))
export_delta(spark, str(store), str(table), {"topics": "orders"})
print(totals())
assert sum(cents for _, _, cents in totals()) == sum(100 * n for n in range(1_500))
