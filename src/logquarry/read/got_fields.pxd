cimport cython
from libc.stdint cimport int32_t, int64_t

cdef extern from *:
    """
    /* Does what kind.__new__(kind) does, without a lookup; `nothing` is an empty tuple. */
    static inline PyObject *logquarry_new(PyObject *kind, PyObject *nothing) {
        return ((PyTypeObject *)kind)->tp_new((PyTypeObject *)kind, nothing, NULL);
    }
    """
    object new_of "logquarry_new"(object kind, object nothing)

cdef extern from *:
    """
    typedef void (*logquarry_frame_rows)(long long, long long, long long);
    #define logquarry_call_frame_rows(address, frames, count, out) \\
        (((logquarry_frame_rows)(size_t)(address))((long long)(size_t)(frames), (count), \\
                                                   (long long)(size_t)(out)))
    """
    void call_kernel "logquarry_call_frame_rows"(
        long long address, const char *frames, long long count, const char *out
    )

# The same layout as logquarry.format.arrays.ROW.
cdef struct Row:
    int64_t queue_offset
    int64_t store_timestamp
    int64_t physical_offset
    int32_t frame_at
    int32_t size
    int32_t body_at
    int32_t body_end
    int32_t tags_at
    int32_t tags_end

ctypedef Row *row_pointer

cdef int _ROW_SIZE, _ASK, _NONE, _SAME

cdef class GotFields:
    cdef public long long queue_offset
    cdef public long long store_timestamp
    cdef public long long physical_offset
    cdef public int size
    cdef public object tags
    cdef public object broker
    cdef public object _delay_levels_ms
    cdef public bytes _block
    cdef public int _frame_at
    cdef public int _body_at
    cdef public int _body_end

cdef class GotBlock:
    cdef public bytes frames
    cdef public Py_ssize_t _count
    cdef public object _broker
    cdef public object _levels
    cdef public object _made

cdef long long _address

@cython.locals(table=bytes)
cdef bytes _find_rows(bytes frames, Py_ssize_t count)

@cython.locals(
    made=list, message=GotFields, block=bytes, rows=bytes, data="const char *",
    table="const char *", row="Row *", count=Py_ssize_t, number=Py_ssize_t, length=Py_ssize_t
)
cpdef tuple make_messages(kind, GotBlock messages, tags_of)
