"""RocketMQ's own Java clients and mqadmin (4.9.8 and 5.3.3) with our broker."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.broker import Broker, BrokerOptions, background
from logquarry.broker.acl import AccessControl, Account
from tests.conformance.oracle import RUN, require_oracle
from tests.conformance.oracle import broker as rocketmq
from tests.helpers.replication import make_certificate

pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

CLIENTS = RUN.parent / "clients" / "run"
SCENARIOS = (
    *("send", "async", "oneway", "batch", "pull", "litepull", "push", "orderly", "tags", "sql"),
    *("delay", "retry", "broadcast", "transaction", "check", "request", "query", "compressed"),
    "large",
)
VERSIONS = ("4.9.8", "5.3.3")
"""Of RocketMQ's clients. Those of 5.x speak remoting too."""
CONFIG = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 26,
    # The scenario check waits for two rounds.
    transaction_check_interval=1_000,
    transaction_time_out=1_000,
)
PARAMS = {"mappedFileSizeCommitLog": CONFIG.mapped_file_size_commit_log}


def run(
    *words: str, lines: str = "", jvm: str = "", check: bool = True, version: str = VERSIONS[0]
) -> str:
    """What the clients print; with ``check`` all scenarios must succeed."""
    settings = {"CLIENTS_JVM": f"-Dpatience=120 {jvm}", "CLIENTS_VERSION": version}
    done = subprocess.run(
        [CLIENTS, *words],
        input=lines,
        capture_output=True,
        text=True,
        env=os.environ | settings,
        timeout=800,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    require_oracle(CLIENTS)
    with background(tmp_path_factory.mktemp("broker") / "s", config=CONFIG) as broker:
        yield broker


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcome(served: Broker, version: str) -> dict[str, str]:
    """What each scenario printed: they run in one JVM."""
    printed = run(served.name_server, *SCENARIOS, check=False, version=version)
    lines = [line for line in printed.splitlines() if line.startswith(("OK ", "FAIL "))]
    return {line.split()[1]: line for line in lines}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_java_client(outcome: dict[str, str], name: str, version: str) -> None:
    if (name, version) == ("request", "5.3.3"):
        # It waits for no reply: RequestResponseFuture.acquireCountDownLatch ends the wait when the
        # request is sent.
        pytest.skip("the client's request() never waits")
    assert outcome[name].startswith("OK ")


ADMIN = {
    "clusterList": "broker-a",
    "updateTopic -c DefaultCluster -t adm -r 4 -w 4": "create topic to",
    "topicList": "adm",
    "topicClusterList -t adm": "DefaultCluster",
    "topicRoute -t adm": '"writeQueueNums":4',
    "sendMessage -t adm -p hello -k key1 -i 0 -b broker-a": "SEND_OK",
    "topicStatus -t adm": "broker-a",
    "brokerStatus -b ADDRESS": "brokerVersionDesc",
    "getBrokerConfig -b ADDRESS": "autoCreateTopicEnable",
    "updateSubGroup -c DefaultCluster -g gadm": "create subscription group",
    "consumeMessage -t adm -g gadm": "BODY: hello",
    "printMsg -t adm": "hello",
    "queryMsgByKey -t adm -k key1": "adm",
    "queryMsgByOffset -t adm -b broker-a -i 0 -o 0": "OffsetID",
    "consumerProgress": "#Group",
    "consumerProgress -g GROUP": "Consume TPS",
    "resetOffsetByTime -g GROUP -t TOPIC -s 0": "rollback consumer offset|#resetOffset",
    "producerConnection -g none -t adm": "not exist",
    "consumerConnection -g none": "%RETRY%none",
    "deleteSubGroup -c DefaultCluster -g gadm": "delete subscription group",
    "deleteTopic -c DefaultCluster -t adm": "delete topic [adm] from cluster",
}
"""A command of mqadmin, and words of its output; those of 5.3.3 after the bar if they differ."""


def test_mqadmin(served: Broker, outcome: dict[str, str], version: str) -> None:
    assert outcome["push"].startswith("OK ")
    group = next(name for name in served.core.tables.groups if name.startswith("c-push"))
    names = {"ADDRESS": served.address, "GROUP": group, "TOPIC": group.replace("c-", "t-", 1)}
    commands = []
    for command in ADMIN:
        words = [names.get(word, word) for word in command.split()]
        commands.append(" ".join((*words, "-n", served.name_server)))
    printed = run("mqadmin", lines="\n".join(commands), version=version)
    parts = printed.split("== ")[1:]
    assert len(parts) == len(ADMIN)
    lacking = [
        (command, part)
        for (command, words), part in zip(ADMIN.items(), parts, strict=True)
        if not any(one in part for one in words.split("|"))
    ]
    assert not lacking, lacking


def test_accounts(tmp_path: Path) -> None:
    """Every scenario works with an account that may do everything, and none without a key."""
    require_oracle(CLIENTS)
    both = frozenset({"PUB", "SUB"})
    account = Account("client1", "secret1", default_topic=both, default_group=both)
    options = BrokerOptions(acl=AccessControl(account))
    names = tuple(name for name in SCENARIOS if name not in ("check", "large"))
    with background(tmp_path / "s", options=options, config=CONFIG) as broker:
        printed = run(*(broker.name_server, *names), jvm="-DaccessKey=client1 -DsecretKey=secret1")
        assert printed.count("OK ") == len(names)
        for keys in ("", "-DaccessKey=client1 -DsecretKey=secret2"):
            assert "REFUSED" in run(broker.name_server, "refused", jvm=f"-Dtopic=t {keys}")


def test_tls(tmp_path: Path) -> None:
    require_oracle(CLIENTS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path))
    with background(tmp_path / "s", options=BrokerOptions(tls=context), config=CONFIG) as broker:
        # Java's client trusts any certificate in its test mode, which is its default.
        printed = run(broker.name_server, "send", "push", jvm="-DuseTls=true")
        assert printed.count("OK ") == 2


def test_rocketmq_goes_on_with_the_store(tmp_path: Path) -> None:
    """Messages, topic, group and offsets: RocketMQ's broker gives the group what is left."""
    require_oracle(CLIENTS)
    require_oracle(RUN)
    root = tmp_path / "s"
    words = "-Dtopic=orders -Dgroup=billing"
    with background(root, config=CONFIG) as broker:
        run(broker.name_server, "produce", jvm=f"{words} -Dcount=40 -Dprefix=a")
        got = run(broker.name_server, "consume", jvm=f"{words} -Dcount=40")
        assert got.count("GOT a") == 40
        run(broker.name_server, "produce", jvm=f"{words} -Dcount=10 -Dprefix=b")
    with rocketmq(root, PARAMS) as names:
        got = run(names, "consume", jvm=f"{words} -Dcount=10")
        assert got.count("GOT b") == 10 and "GOT a" not in got
        run(names, "produce", jvm=f"{words} -Dcount=5 -Dprefix=c")
    with background(root, config=CONFIG) as broker:
        got = run(broker.name_server, "consume", jvm=f"{words} -Dcount=5")
        assert got.count("GOT c") == 5 and got.count("GOT") == 5


def test_the_live_store_of_rocketmq_is_served(tmp_path: Path) -> None:
    """A group of our broker consumes what RocketMQ's broker gets meanwhile, and changes nothing."""
    require_oracle(CLIENTS)
    require_oracle(RUN)
    root = tmp_path / "s"
    words = "-Dtopic=orders -Dgroup=copy"
    with rocketmq(root, PARAMS) as names:
        run(names, "produce", jvm=f"{words} -Dcount=20 -Dprefix=a")
        with background(root, options=BrokerOptions(read_only=True), config=CONFIG) as broker:
            got = run(broker.name_server, "consume", jvm=f"{words} -Dcount=20")
            assert got.count("GOT a") == 20
            run(names, "produce", jvm=f"{words} -Dcount=10 -Dprefix=b")
            got = run(broker.name_server, "consume", jvm=f"{words} -Dcount=10")
            assert got.count("GOT b") == 10 and "GOT a" not in got
            assert "REFUSED" in run(broker.name_server, "refused", jvm=words)
        # The offsets of the group stayed with our broker.
        got = run(names, "consume", jvm=f"{words} -Dcount=30")
        assert got.count("GOT") == 30
