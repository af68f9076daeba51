from logquarry.write.frame_append cimport FrameAppend

cdef class LogAppender(FrameAppend):
    cdef public object config
    cdef public object encoder
    cdef public object file_size
    cdef object _rules
    cdef object _ends_foreign
    cdef object _busy_after
