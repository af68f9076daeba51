"""The Python client of PyPI (`rocketmq` 0.4.4) against a name server: prints OK or FAIL."""

import sys
import threading

from rocketmq.client import Message, Producer, PullConsumer, PushConsumer

NAMES, TOPIC, COUNT = sys.argv[1], "t-python", 20
WANTED = {b"body %d" % number for number in range(COUNT)}


def send() -> bool:
    """Send COUNT messages."""
    producer = Producer("p-python")
    producer.set_namesrv_addr(NAMES)
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

    consumer = PushConsumer("c-python")
    consumer.set_namesrv_addr(NAMES)
    consumer.subscribe(TOPIC, take, "a")
    consumer.start()
    done.wait(90)
    consumer.shutdown()
    return found == WANTED


def pull() -> bool:
    """Pull them."""
    consumer = PullConsumer("c-python-pull")
    consumer.set_namesrv_addr(NAMES)
    consumer.start()
    found = {message.body for message in consumer.pull(TOPIC)}
    consumer.shutdown()
    return found == WANTED


for work in (send, push, pull):
    try:
        print("OK" if work() else "FAIL", work.__name__, flush=True)
    except Exception as error:
        print("FAIL", work.__name__, repr(error), flush=True)
