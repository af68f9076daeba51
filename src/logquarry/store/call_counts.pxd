cimport cython

from logquarry.write.put_parts cimport Recent

cdef double _FIRST_BOUND
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
