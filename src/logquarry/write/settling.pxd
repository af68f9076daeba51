from logquarry.write.put_parts cimport Wakes

cdef object _OK, _LATE_DISK, _LATE_SLAVE, _ALONE, _monotonic

cdef class PutFuture:
    cdef public object _callbacks
    cdef public object _result
    cdef public object _error
    cdef public int _forks
    cdef object __weakref__
    cpdef bint done(self)
    cpdef set_result(self, result)
    cpdef set_exception(self, error)

cdef class Once:
    cdef bint _is_taken
    cpdef bint take(self)

cdef class WaitingPut(PutFuture):
    cdef object _appended
    cdef object _flush
    cdef object _replica
    cdef object _settled
    cdef object _failed
    cdef double _began
    cdef double _took
    cdef Once _first
    cdef Once _open
    cpdef flushed(self, in_time)
    cpdef replicated(self, in_time)
    cpdef _heard(self)
    cpdef fail(self, error)

cdef class PutWait(Once):
    cdef public long long offset
    cdef public long long deadline
    cdef object _heard
    cdef object _fail
    cpdef resolve(self, in_time)
    cpdef fail(self, error)

cdef class LogGrowth:
    cdef object _dispatching
    cdef object _flushing
    cdef object _appended
    cdef public object _flusher
    cdef object _replicas
    cdef object _change
    cdef tuple _followers
    cdef Wakes _wake_followers
    cdef readonly Wakes settle_now
    cpdef wake(self)
    cpdef settle_later(self, result, wait, done, failed)
