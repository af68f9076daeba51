cimport cython

from logquarry.write.frame_append cimport FrameHead, Item, Topic
from logquarry.write.log_appender cimport LogAppender

cdef int _NAME_SIZE, _HELD
cdef double _SLOW_MS
cdef object _Message

cdef bint is_written_as_given(object text, object tags, object keys, object properties) except -1
cdef object properties_text(object message)

cdef class PutPath(LogAppender):
    @cython.final
    cdef object put_typed(self, message)
    cpdef append_message(self, message)
    @cython.final
    cdef object put_common(self, message)
    @cython.final
    @cython.locals(fields=tuple, topic=Topic, head=FrameHead, item=Item, held=double)
    cdef object _put_one(self, message)
    @cython.final
    cdef int _fill(
        self, Item *item, bytes body, object tags, object keys, object text, object flag
    ) except -1
