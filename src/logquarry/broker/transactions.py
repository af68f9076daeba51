"""Ends and checks the transactions of producers (``EndTransactionProcessor``).

A check sends the half message to a producer of its group; the producer answers with the end of the
transaction. As in RocketMQ, the store's check service decides when to check.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Final

from logquarry.broker.acl import PUB
from logquarry.broker.connection import Request
from logquarry.broker.core import Core, Part, answers
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
"""Values of ``MessageSysFlag``. All other values leave the transaction open."""


class Transactions(Part):
    """Ends and checks the transactions of producers."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._checks: Mailbox[OpenTransaction] = Mailbox(core.loop, self._ask)
        if core.writer is not None:
            core.writer.start_transaction_checks(self.check)

    @answers(RequestCode.END_TRANSACTION)
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
        """Let a producer decide about a transaction; called by the thread of the checks."""
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
        # The producer gets the message as it will be after a commit.
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
