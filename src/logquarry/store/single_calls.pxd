cimport cython

from logquarry.read.get_kernel cimport KernelGet
from logquarry.store.call_counts cimport CallCounter
from logquarry.write.commit_log_writer cimport CommitLogWriter
from logquarry.write.frame_append cimport exact_ns, ticks_ns
from logquarry.write.settling cimport LogGrowth

cdef double _SLOW

cdef class _Count:
    cdef CallCounter _counter
    cdef object _topic
    cdef long long _began
    cpdef settled(self, result)
    cpdef failed(self)

cdef class SingleCalls:
    cdef public dict _live_queues
    cdef public object _health
    cdef public CallCounter _counter
    cdef public KernelGet _kernel
    cdef CommitLogWriter _path
    cdef object _feed
    cdef LogGrowth _growth

    @cython.locals(took=double, began="long long", count="long long", kernel=KernelGet)
    cpdef get(self, topic, queue_id, offset=*, max_count=*, tag=*)
    @cython.locals(took=double, began="long long")
    cpdef put(self, message)
    cpdef put_async(self, message)
    @cython.locals(count=_Count)
    cpdef _append(self, message)
    @cython.locals(took=double, began="long long")
    cpdef put_batch(self, messages=*, wire=*, message=*)
    @cython.locals(count=_Count)
    cpdef put_batch_async(self, messages=*, wire=*, message=*)
