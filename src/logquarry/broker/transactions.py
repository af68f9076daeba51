"""Ends and checks the transactions of producers (``EndTransactionProcessor``).

To check a transaction, the broker sends its half message to a producer of the same group. The
producer answers by committing or rolling back the transaction. As in RocketMQ, the store's check
service decides when to check.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from logquarry.broker.acl import PUB
from logquarry.broker.connection import Handler, Request
from logquarry.broker.core import Core
from logquarry.broker.lanes import Mailbox
from logquarry.broker.send import refusal_of
from logquarry.broker.sparing import SparingLog
from logquarry.errors import LogquarryError
from logquarry.format import frame
from logquarry.format import properties as props
from logquarry.protocol.remoting_codes import RequestCode
from logquarry.store.transaction.checks import OpenTransaction

_lonely = SparingLog(logging.getLogger(__name__))

_STATES: Final = {8: "commit", 12: "rollback"}
"""The values of ``MessageSysFlag`` that end a transaction. All other values leave it open."""


class Transactions:
    """Ends and checks the transactions of producers.

    Args:
        core: the broker's parts.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._checks: Mailbox[OpenTransaction] = Mailbox(core.loop, self._ask)
        if core.writer is not None:
            core.writer.start_transaction_checks(self.check)

    def handlers(self) -> Mapping[int, Handler]:
        """The requests that this part answers."""
        return {RequestCode.END_TRANSACTION: self.end}

    async def end(self, request: Request) -> None:
        """Commit or roll back a transaction, or leave it open."""
        core, fields = self._core, request.fields
        writer = core.tables.require_writer()
        state = _STATES.get(fields["commitOrRollback"])
        if request.account is not None:
            half = await core.slow(partial(core.store.message_at, fields["commitLogOffset"]))
            request.require(half.properties.get(props.REAL_TOPIC, ""), PUB)
        if state is not None:
            job = partial(
                writer.end_transaction,
                fields["commitLogOffset"],
                state,
                group=fields["producerGroup"],
                queue_offset=fields["tranStateTableOffset"],
            )
            future = await core.lanes.puts.run(job)
            if future is not None:
                try:
                    await future
                except LogquarryError as error:
                    raise refusal_of(error) from error
        request.reply()

    def check(self, transaction: OpenTransaction) -> str:
        """Send a half message to a producer, which decides about the transaction.

        The thread of the checks calls this.
        """
        self._checks.post(transaction)
        return "unknown"

    def _ask(self, transaction: OpenTransaction) -> None:
        message = transaction.message
        group = message.properties.get(props.PRODUCER_GROUP, "")
        producer = self._core.clients.producer_of(group, transaction.topic)
        if producer is None:
            _lonely.warning(
                "no producer of group %s is connected to decide about the transaction at %d",
                *(group, message.physical_offset),
            )
            return
        # The producer gets the message in the form that it will have after a commit.
        shown = dataclasses.replace(
            message.frame, topic=transaction.topic.encode(), queue_id=transaction.queue_id
        )
        unique = message.uniq_key or ""
        producer.connection.tell(
            RequestCode.CHECK_TRANSACTION_STATE,
            {
                "tranStateTableOffset": str(message.queue_offset),
                "commitLogOffset": str(message.physical_offset),
                "msgId": unique,
                "transactionId": unique,
                "offsetMsgId": message.message_id,
            },
            frame.encode(shown),
        )
