cimport cython
from libc.stdint cimport int64_t

from logquarry.disk.file_place cimport FilePlace
from logquarry.write.frame_append cimport FrameHead, Item, measured, store64, write_frame
from logquarry.write.commit_log_writer cimport (
    CommitLogWriter, grown
)

cdef enum:
    _QUEUES = 32

cdef int _BLANK, _QUEUE_OFFSET_AT, _PHYSICAL_OFFSET_AT, _PAUSE, _LONGEST
cdef Py_ssize_t _AT_FIRST, _BYTES_AT_FIRST

ctypedef int64_t *number_pointer

cdef struct Row:
    int size
    int topic
    int host
    int queue
    int time_at
    bint advances

ctypedef Row *row_pointer

cdef struct QueueRun:
    long long next
    long long run

ctypedef QueueRun *queue_pointer

cdef class TopicQueues:
    cdef bytes data
    cdef int number
    cdef dict queues
    cdef int first[_QUEUES]

cdef class CommonFrames:
    cdef CommitLogWriter _writer
    cdef readonly Py_ssize_t count
    cdef readonly dict odd
    cdef readonly dict topics
    cdef readonly dict hosts
    cdef list _keys
    cdef char *_data
    cdef Row *_rows
    cdef QueueRun *_queues
    cdef int *_used
    cdef Py_ssize_t _length, _room, _row_room, _queue_room, _appended
    cdef long long _run

    @cython.locals(
        writer=CommitLogWriter, head=FrameHead, found=FrameHead, host=int, number=Py_ssize_t, row="Row *",
        topic=TopicQueues, fields=tuple, item=Item, size="long long"
    )
    cpdef take(self, messages, field)
    @cython.locals(topic=TopicQueues)
    cdef TopicQueues _new_topic(self, name)
    @cython.locals(number=int, room=Py_ssize_t, queues="void *", used="void *", is_low=bint)
    cdef int _queue(self, TopicQueues topic, name, int queue_id) except -1
    @cython.locals(room=Py_ssize_t)
    cdef int _more_rows(self) except -1
    @cython.locals(room=Py_ssize_t)
    cdef int _more_bytes(self, long long size) except -1
    @cython.locals(column=number_pointer, count=Py_ssize_t, number=Py_ssize_t)
    cpdef fill_columns(self, columns)
    @cython.locals(
        column=number_pointer, step=Py_ssize_t, last=FilePlace,
        at="long long", frames="char *", place="char *", whole="long long", used=int,
        number=Py_ssize_t, row="Row *", queue="QueueRun *", queue_offset="long long",
        physical_offset="long long", index=int
    )
    cpdef append(
        self, file, dict offsets, Py_ssize_t start, Py_ssize_t stop, long long now, columns
    )
