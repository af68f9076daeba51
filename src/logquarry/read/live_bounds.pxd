cimport cython

from logquarry.disk.file_place cimport FilePlace, LastFile

cdef long long _UNIT

cdef class LiveBounds:
    cdef public LastFile _files
    cdef public LastFile _log
    cdef public tuple _low

    @cython.locals(files=LastFile, last=FilePlace)
    cpdef tuple bounds(self)
