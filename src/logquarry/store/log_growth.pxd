from logquarry.write.put_parts cimport Wakes

cdef class LogGrowth:
    cdef object _dispatching
    cdef object _flushing
    cdef public object _wait
    cdef object _change
    cdef tuple _followers
    cdef Wakes _wake_followers
    cdef readonly Wakes settle_now

    cpdef wake(self)
    cpdef settle_later(self, result, wait, done, failed)
