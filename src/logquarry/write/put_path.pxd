cimport cython

from logquarry.write.frame_append cimport FrameAppend, FrameHead, Item

cdef int _NAME_SIZE
cdef double _SLOW_MS

cdef bint is_common(
    object tags, object keys, object properties, object text, object delay_level, object wait
) except -1
cdef object properties_text(object message)

cdef class PutPath(FrameAppend):
    cpdef put(self, message)
    cpdef append_message(self, message)
    @cython.locals(fields=tuple)
    cpdef object put_common(self, message)

    @cython.locals(
        topic_data=bytes, head=FrameHead, item=Item, reconsumed=int, prepared="long long"
    )
    cdef object _append_one(
        self, object topic, bytes body, object queue_id, object tags, object keys, object text,
        object flag, object sys_flag, object born, object born_host, object store_host,
        object reconsume_times, object prepared_offset
    )
    cdef int _fill(
        self, Item *item, bytes body, object tags, object keys, object text, object flag
    ) except -1
