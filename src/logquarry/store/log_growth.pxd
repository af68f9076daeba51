cdef class LogGrowth:
    cdef object _dispatching
    cdef object _flushing
    cdef public object _wait
    cdef object _change
    cdef tuple _followers
    cdef tuple _after_append
    cdef tuple _after_put

    cpdef wake(self)
    cpdef settle_later(self, result, wait, done, failed)
    cpdef settle_now(self, result, wait)
