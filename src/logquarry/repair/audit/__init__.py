"""Compares the log, the consume queues and the index of a store with each other.

:mod:`.differences` defines the rules and limits that verify and recover share. The table shows for
each difference what verify reports, and what recover does.

===============================  ================================  =============================
difference                       in verify                         in recover
===============================  ================================  =============================
file of a wrong size             wrong_file_size, empty_file       extend, cut; rebuild the queue
file missing between two         missing_file, queue_file_missing  put_blank; rebuild the queue
first files missing              missing_file; log_start if        record the new start; none
                                 nothing records the start
checkpoint after the log's end   checkpoint_ahead                  write_checkpoint
break in the chain of frames     the damage kinds, torn_tail       end of the log, or note_damage
frames after the log's end       stale_frames                      zero, set_aside
queue without files              queue_missing                     build_queue
queue ends before the log        queue_behind                      build_queue
entry never written              queue_hole                        cut, build_queue
the same in a queue whose        queue_hole                        build_queue
messages have all expired
entry differs from its message   queue_entry_wrong                 cut, build_queue
first messages have no entry     queue_head_missing                rebuild the queue
entry of no message of the log   queue_ahead, queue_misplaced,     cut, or rebuild the queue
                                 queue_entry_dangling
entry of a lost message          queue_in_damage, queue_filler     stays
queue offset decreases           new_epoch                         only later entries stay
queue offset is harmed           harmed_queue_offset               the message keeps its place
queue id is harmed               harmed_queue_id                   the message keeps its place
transaction type is harmed       harmed_transaction_type           the message keeps its place
index header, order, first and   index_header, index_entry,        set_aside, build_index
last message, shape              index_ahead, index_shape
index chain                      index_chain                       set_aside if it leads forward
index key                        index_entry_wrong, index_gap      none: a query skips it
keys after the index's end       index_behind, index_missing       build_index
===============================  ================================  =============================

A queue offset, a queue id or a transaction type is *harmed* if damage changed it in the frame.
Verify reports every harmed queue offset (:mod:`.queues`). Recover and rebuild take the right offset
from the neighbouring messages or from the queue (:mod:`.right_offsets`). For a frame with a harmed
queue id, the entries of the queues show the right queue. If a frame seems to be a half message or a
rollback, an entry of its queue can show that the type is harmed. The module :mod:`.harmed_frames`
finds harmed queue ids and transaction types. If a queue differs from the log, recover writes the
entries of the queue again, beginning with the first different entry (:mod:`.first_difference`). In
rare cases, verify and recover give different verdicts on the queues.

The recovery mode ``rocketmq`` does not use this package. It repeats the steps of RocketMQ
(``java_*.py`` in :mod:`logquarry.repair.recover`).
"""
