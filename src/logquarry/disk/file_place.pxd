cdef class FilePlace:
    cdef public long long base
    cdef public long long size
    cdef public long long wrote
    cdef public long long store_timestamp
    cdef public size_t address

cdef class LastFile:
    cdef public object last
    cdef public object bases

cdef class HealthReason:
    cdef public object reason

cdef class Refusals:
    cdef public frozenset refusals
