cdef class PutFuture:
    cdef public object _callbacks
    cdef public object _result
    cdef public object _error
    cdef public int _forks
    cdef object __weakref__
    cpdef bint done(self)
    cpdef set_result(self, result)
    cpdef set_exception(self, error)
