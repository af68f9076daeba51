cimport cython

from logquarry.disk.file_place cimport LastFile
from logquarry.read.got_fields cimport GotBlock, new_of

cdef extern from *:
    """
    typedef long long (*logquarry_get_frames)(long long, long long, long long, long long,
                                              long long, long long, long long, long long);
    #define logquarry_call_kernel(address, a, b, c, d, e, f, g, h) \\
        (((logquarry_get_frames)(size_t)(address))(a, b, c, d, e, f, g, h))
    """
    long long call_kernel "logquarry_call_kernel"(
        long long address, long long units, long long count, long long most, long long memory,
        long long wanted, long long state, long long to, long long room
    )

ctypedef const char *chars

cdef long long _SHIFT, _MASK, _NOT_AT_HAND, _LEAST, _UNIT

cdef class _Entries:
    cdef readonly object units
    cdef readonly long long first
    cdef readonly long long stop
    cdef readonly long long address

cdef class LogAtHand:
    cdef readonly object data
    cdef readonly object state
    cdef readonly long long end
    cdef readonly long long address

cdef class _Scratch:
    cdef readonly object view
    cdef readonly long long address

cdef class _Tags:
    cdef readonly list data
    cdef readonly object state
    cdef readonly long long address

cdef class KernelGet:
    cdef object _log
    cdef readonly object limits
    cdef object _broker
    cdef object _levels
    cdef object _kernel
    cdef long long _kernel_address
    cdef long long _reference_gets
    cdef list _free
    cdef dict _entries
    cdef dict _tags
    cdef LogAtHand _at_hand
    cdef LastFile _live_files
    cdef object _files
    cdef bint _in_memory
    cdef bint _may_shrink
    cdef double _next_check

    @cython.locals(
        low="long long", high="long long", most="long long", wanted="long long",
        last="long long", count="long long", first="long long", on_disk="long long",
        to="long long", found="long long", taken="long long", after="long long",
        size=Py_ssize_t, now=double, subscription=_Tags, units=_Entries, at_hand=LogAtHand,
        scratch=_Scratch, free=list, messages=GotBlock
    )
    cpdef object get(self, queue, long long offset, long long max_count, object tags=*)
    @cython.locals(found="long long", address="long long")
    cdef long long _run(
        self, long long first, long long count, long long most, long long on_disk,
        long long wanted, long long log, long long to
    ) except? -1
    cdef bint _load(self) except -1
    cdef _Tags _subscription(self, object tags)
    @cython.locals(next_file="long long", first="long long")
    cdef _Entries _read_entries(self, queue, long long offset)
    @cython.locals(at="long long")
    cdef LogAtHand _read_log(self, _Entries units, long long offset, long long count=*)
