cimport cython

from logquarry.store.call_counts cimport CallCounter
from logquarry.write.put_path cimport PutPath, ticks_ns

cdef double _SLOW

cdef class SinglePut:
    cdef PutPath _path
    cdef CallCounter _counter
    cdef object _feed

    @cython.locals(took=double)
    cpdef put(self, message)
