cimport cython

cdef long long _UNIT

cdef class FilePlace:
    cdef public long long base
    cdef public long long size
    cdef public long long wrote
    cdef public long long store_timestamp
    cdef public size_t address

cdef class LastFile:
    cdef public object last
    cdef public object bases

cdef class LiveBounds:
    cdef public LastFile _files
    cdef public LastFile _log
    cdef public tuple _low

    @cython.locals(files=LastFile, last=FilePlace)
    cpdef tuple bounds(self)

cdef class HealthReason:
    cdef public object reason

cdef class Refusals:
    cdef public frozenset refusals
