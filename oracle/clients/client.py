"""The Python client of PyPI (`rocketmq` 0.4.4) against a name server: prints OK or FAIL.

Arguments: the name server, and the keys of an account, if the broker has accounts.
"""

import sys
import threading

from rocketmq.client import Message, Producer, PullConsumer, PushConsumer
from rocketmq.ffi import MessageModel

NAMES, TOPIC, COUNT = sys.argv[1], "t-python", 20
KEYS = sys.argv[2:4]
WANTED = {b"body %d" % number for number in range(COUNT)}


def prepared(client: object) -> object:
    """A client with its name server and account."""
    client.set_namesrv_addr(NAMES)
    if KEYS:
        client.set_session_credentials(*KEYS, "")
    return client


def send() -> bool:
    """Send COUNT messages."""
    producer = prepared(Producer("p-python"))
    producer.start()
    for number in range(COUNT):
        message = Message(TOPIC)
        message.set_keys(f"k{number}")
        message.set_tags("a")
        message.set_body(f"body {number}")
        assert producer.send_sync(message).status == 0
    producer.shutdown()
    return True


def push() -> bool:
    """Consume them with a push consumer."""
    found: set[bytes] = set()
    done = threading.Event()

    def take(message: object) -> None:
        found.add(message.body)
        if found == WANTED:
            done.set()

    consumer = prepared(PushConsumer("c-python"))
    consumer.subscribe(TOPIC, take, "a")
    consumer.start()
    done.wait(90)
    consumer.shutdown()
    return found == WANTED


def pull() -> bool:
    """Pull them."""
    consumer = prepared(PullConsumer("c-python-pull"))
    consumer.start()
    found = {message.body for message in consumer.pull(TOPIC)}
    consumer.shutdown()
    return found == WANTED


def broadcast() -> bool:
    """Each of two consumers of a group gets all messages."""
    found: list[set[bytes]] = [set(), set()]
    done = [threading.Event(), threading.Event()]
    consumers = []
    for number in range(2):

        def take(message: object, number: int = number) -> None:
            found[number].add(message.body)
            if found[number] == WANTED:
                done[number].set()

        model = MessageModel.BROADCASTING
        consumer = prepared(PushConsumer("c-python-all", message_model=model))
        consumer.set_instance_name(f"consumer-{number}")
        consumer.subscribe(TOPIC, take, "a")
        consumer.start()
        consumers.append(consumer)
    # A consumer without an offset starts at the end, and it does not report when it has started.
    for _ in range(15):
        if all(event.wait(5) for event in done):
            break
        send()
    for consumer in consumers:
        consumer.shutdown()
    return found == [WANTED, WANTED]


for work in (send, push, pull, broadcast):
    try:
        print("OK" if work() else "FAIL", work.__name__, flush=True)
    except Exception as error:
        print("FAIL", work.__name__, repr(error), flush=True)
