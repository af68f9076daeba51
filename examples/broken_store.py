# %% [markdown]
# # A broken store
#
# A store has two damaged messages. You find them, copy every sound message into a new store, and
# compare. The store comes from the package; a RocketMQ 4.9.3 broker wrote it. Run this page as
# `python examples/broken_store.py`; it writes into the folder `example-broken`.

# %%
import shutil
import subprocess
import sys
import tarfile
from importlib.resources import as_file, files
from pathlib import Path

import logquarry as lq

home = Path("example-broken")
shutil.rmtree(home, ignore_errors=True)
home.mkdir()
with (
    as_file(files("logquarry") / "data" / "real-broker.tar.xz") as archive,
    tarfile.open(archive) as tar,
):
    tar.extractall(home, filter="data")
store = home / "real-broker" / "store"

# %% [markdown]
# ## Damage it
#
# A bad sector, copied with `ddrescue`, becomes zeros. Here zeros replace most of two messages.

# %%
with lq.MessageStore.open(store) as reader:
    messages = list(reader.scan())
harmed = [messages[100], messages[300]]
for message in harmed:
    file = max(
        path
        for path in (store / "commitlog").iterdir()
        if int(path.name) <= message.physical_offset
    )
    with file.open("r+b") as log:
        log.seek(message.physical_offset - int(file.name) + 20)
        log.write(bytes(message.size - 20))

# %% [markdown]
# ## Find the damage
#
# `verify` reads everything and changes nothing. On a terminal this is `logquarry verify STORE`.

# %%
report = lq.verify(store)
assert report.has_damage
for finding in report.findings:
    print(finding.kind, finding.file, finding.offset)

# %% [markdown]
# Write a page with charts, which you can open or send (needs `logquarry[report]`):

# %%
command = [sys.executable, "-m", "logquarry", "report", store, "--html", home / "report.html"]
subprocess.run(command, check=False)

# %% [markdown]
# ## Save what is sound
#
# `salvage` copies every sound message into a new store, and lists what is lost.

# %%
saved = lq.salvage(store, into=home / "new-store")
print(saved.to_json()["lost"])

with lq.MessageStore.open(home / "new-store") as new:
    kept = {(m.topic, m.queue_id, m.queue_offset) for m in new.scan()}
missing = {(m.topic, m.queue_id, m.queue_offset) for m in messages} - kept
assert missing == {(m.topic, m.queue_id, m.queue_offset) for m in harmed}
assert not lq.verify(home / "new-store").has_damage
print(f"{len(kept):,} of {len(messages):,} messages are in {home / 'new-store'}")
