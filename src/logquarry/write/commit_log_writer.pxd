cimport cython

from logquarry.write.frame_append cimport FrameHead, Item, Topic, item_pointer, load16, load32
from logquarry.write.log_appender cimport LogAppender

cdef int _NAME_SIZE, _HELD
cdef int _WIRE_FLAG_AT, _WIRE_BODY_LENGTH_AT, _WIRE_HEAD, _WIRE_FIXED, _AT_FIRST
cdef double _SLOW_MS
cdef object _Message

cdef bint is_written_as_given(object text, object tags, object keys, object properties) except -1
cdef object properties_text(object message)
@cython.locals(found="void *")
cdef void *grown(void *memory, size_t size) except NULL

@cython.final
cdef class CommitLogWriter(LogAppender):
    cdef dict __dict__  # so that a test can replace a method of one writer
    cpdef object put(self, message)
    cpdef append_message(self, message)
    cdef object put_common(self, message)
    @cython.locals(fields=tuple, topic=Topic, head=FrameHead, item=Item, held=double)
    cdef object _put_one(self, message)
    @cython.locals(fields=tuple)
    cdef object _fill(self, Item *item, object message, bytes body)
    @cython.locals(
        held=tuple, fields=tuple, head=FrameHead, found=Topic, items="Item *",
        count=Py_ssize_t, reconsumed=int
    )
    cdef object put_common_batch(self, object messages, object wire, object message)
    @cython.locals(
        first=tuple, fields=tuple, count=Py_ssize_t, number=Py_ssize_t, place=Py_ssize_t
    )
    cdef Py_ssize_t _message_items(self, tuple messages, Item **items) except -1
    @cython.locals(
        at="const char *", left="long long", length="long long", room=Py_ssize_t,
        count=Py_ssize_t, item="Item *"
    )
    cdef Py_ssize_t _wire_items(self, bytes wire, Item **items) except -1
