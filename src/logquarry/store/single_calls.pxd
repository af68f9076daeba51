cimport cython

from logquarry.read.get_kernel cimport KernelGet
from logquarry.write.commit_log_writer cimport CommitLogWriter
from logquarry.write.frame_append cimport exact_ns, ticks_ns
from logquarry.write.put_parts cimport Recent
from logquarry.write.settling cimport LogGrowth

cdef double _FIRST_BOUND, _SLOW
cdef long long _SMALL

@cython.final
cdef class TopicCount:
    cdef public long long messages
    cdef public long long size

@cython.final
cdef class CallCounts:
    cdef public long long failed
    cdef public long long quick
    cdef public double longest
    cdef public double lock_longest_ms
    cdef public list times
    cdef public list sizes
    cdef public dict topics
    cdef public long long get_found
    cdef public long long get_missed
    cdef public long long get_messages
    cdef public double get_longest
    cdef Recent _recent
    @cython.locals(found=TopicCount, recent=TopicCount)
    cpdef TopicCount topic(self, topic)
    cpdef whole(self, double seconds)

cdef class CallCounter:
    cdef public object _change
    cdef object _own
    cdef public list _threads
    cdef CallCounts _ended
    cdef CallCounts _last
    cdef long _last_thread

    @cython.locals(counts=CallCounts, found=TopicCount, fields=tuple, size="long long",
                   messages="long long", held_ms=double)
    cpdef put(self, topic, result, double seconds)
    @cython.locals(counts=CallCounts)
    cpdef put_failed(self)
    @cython.locals(counts=CallCounts)
    cpdef got(self, long long messages, double seconds=*)
    @cython.locals(thread=long)
    cpdef CallCounts counts(self)

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
