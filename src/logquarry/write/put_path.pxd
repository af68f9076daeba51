cimport cython

from logquarry.write.frame_append cimport FrameHead, Item, Topic
from logquarry.write.log_appender cimport LogAppender

cdef int _NAME_SIZE, _HELD
cdef double _SLOW_MS

cdef bint is_written_as_given(object text, object tags, object keys, object properties) except -1
cdef object properties_text(object message)

cdef class PutPath(LogAppender):
    cpdef put(self, message)
    cpdef append_message(self, message)
    cpdef object put_common(self, message)
    @cython.locals(fields=tuple, topic=Topic, head=FrameHead, item=Item)
    cdef object _put_one(self, message)
    cdef int _fill(
        self, Item *item, bytes body, object tags, object keys, object text, object flag
    ) except -1
