cimport cython

from logquarry.read.get_kernel cimport KernelGet
from logquarry.store.call_counts cimport CallCounter
from logquarry.write.frame_append cimport exact_ns

cdef class SingleGet:
    cdef public dict _live_queues
    cdef public object _health
    cdef public CallCounter _counter
    cdef public KernelGet _kernel

    @cython.locals(took=double, began="long long", count="long long", kernel=KernelGet)
    cpdef get(self, topic, queue_id, offset=*, max_count=*, tag=*)
