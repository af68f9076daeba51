cdef class FilePlace:
    cdef public long long base
    cdef public long long size
    cdef public long long wrote
    cdef public long long store_timestamp
    cdef public size_t address
