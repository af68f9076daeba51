cimport cython

from logquarry.protocol.remoting_header cimport decode_binary, decode_json, encode_head

cdef Py_ssize_t _SIZE, _PREFIX_SIZE

cpdef encode(command)

cdef class RemotingReader:
    cdef Py_ssize_t _largest, _wanted
    cdef object _received
    cdef bint _is_spoilt
    @cython.locals(position=Py_ssize_t, end=Py_ssize_t)
    cpdef list receive_data(self, data)
    @cython.locals(
        left=Py_ssize_t, length=Py_ssize_t, kind="unsigned long", form=int, size=Py_ssize_t,
        start=Py_ssize_t, end=Py_ssize_t
    )
    cdef Py_ssize_t _take(self, bytes received, Py_ssize_t position, list commands) except -1
