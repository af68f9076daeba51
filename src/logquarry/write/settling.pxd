from logquarry.write.put_future cimport PutFuture

cdef object _OK, _LATE_DISK, _LATE_SLAVE, _ALONE, _monotonic

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

cdef class FlushWait:
    cdef object _flusher
    cdef public object appended
    cdef object _replicas
    cpdef asked(self, result, wait)
    cpdef settle_later(self, result, wait, asked, done, failed)
