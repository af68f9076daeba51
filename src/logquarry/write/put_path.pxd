cimport cython

from logquarry.write.frame_append cimport (
    FrameAppend, FrameHead, Item, item_pointer, load16, load32
)

cdef int _NAME_SIZE, _WIRE_FLAG_AT, _WIRE_BODY_LENGTH_AT, _WIRE_HEAD, _WIRE_FIXED, _AT_FIRST
cdef double _SLOW_MS

cdef class PutPath(FrameAppend):
    cpdef put(self, message)
    cpdef append_message(self, message)
    @cython.locals(fields=tuple)
    cpdef object put_common(self, message)

    @cython.locals(
        topic_data=bytes, head=FrameHead, item=Item, reconsumed="long long", prepared="long long"
    )
    cdef object _append_one(
        self, object topic, bytes body, object queue_id, object tags, object keys, object text,
        object flag, object sys_flag, object born, object born_host, object store_host,
        object reconsume_times, object prepared_offset
    )
    cdef int _fill(
        self, Item *item, bytes body, object tags, object keys, object text, object flag
    ) except -1

    @cython.locals(
        held=tuple, fields=tuple, head=FrameHead, topic_data=bytes, items="Item *",
        count=Py_ssize_t, reconsumed="long long"
    )
    cdef object put_common_batch(self, object messages, object wire, object message)
    @cython.locals(
        first=tuple, fields=tuple, count=Py_ssize_t, number=Py_ssize_t, place=Py_ssize_t
    )
    cdef Py_ssize_t _message_items(self, tuple messages, Item **items) except -1
    @cython.locals(
        at="const char *", left="long long", length="long long", room=Py_ssize_t,
        count=Py_ssize_t, item="Item *", more="void *"
    )
    cdef Py_ssize_t _wire_items(self, bytes wire, Item **items) except -1
