cimport cython

cdef extern from *:
    """
    /* A name's place in the cache, from its address. Addresses are multiples of 16, so the low
       four bits are dropped. */
    #define logquarry_recent_place(name) ((Py_ssize_t)((((size_t)(name) >> 4 ^ (size_t)(name) >> 10) & 63)))
    /* Takes a lock, without the GIL during the wait. Returns 0 if a signal ended the wait. */
    static inline int logquarry_acquire(PyThread_type_lock lock) {
        int status;
        if (PyThread_acquire_lock_timed(lock, 0, 0) == PY_LOCK_ACQUIRED) return 1;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(lock, -1, 1);
        Py_END_ALLOW_THREADS
        return status == PY_LOCK_ACQUIRED;
    }
    """
    Py_ssize_t recent_place "logquarry_recent_place"(object name)
    bint acquire_lock "logquarry_acquire"(void *lock)

@cython.final
cdef class LogLock:
    cdef void *_gate
    cdef bint _is_taken
    cdef bint _is_open
    cdef int _waiting
    @cython.locals(has_passed=bint)
    cdef int take(self) except -1
    cdef void release(self) noexcept

@cython.final
cdef class Wakes:
    cdef tuple _tests_and_flags
    cpdef use(self, flags)
    @cython.locals(found=tuple, number=Py_ssize_t)
    cdef int wake(self) except -1

@cython.final
cdef class Recent:
    cdef list names
    cdef list values
    @cython.locals(at=Py_ssize_t)
    cdef object get(self, name)
    @cython.locals(at=Py_ssize_t)
    cdef int put(self, name, value) except -1
