cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t

from logquarry.disk.file_place cimport FilePlace, HealthReason, LastFile, Refusals
from logquarry.write.put_parts cimport LogLock, Recent, Wakes

cdef extern from *:
    """
    #include <time.h>
    /* This Linux clock advances only every few ms, but reading it takes a fifth of the time. */
    #ifdef CLOCK_MONOTONIC_COARSE
    #define LOGQUARRY_TICKS CLOCK_MONOTONIC_COARSE
    #else
    #define LOGQUARRY_TICKS CLOCK_MONOTONIC
    #endif
    static inline long long logquarry_ns(clockid_t clock) {
        struct timespec now;
        clock_gettime(clock, &now);
        return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
    }
    #define logquarry_ticks_ns() logquarry_ns(LOGQUARRY_TICKS)
    #define logquarry_exact_ns() logquarry_ns(CLOCK_MONOTONIC)
    #define logquarry_time_ns() logquarry_ns(CLOCK_REALTIME)

    static inline int logquarry_load16(const char *at) {
        return (int16_t)((uint16_t)(uint8_t)at[0] << 8 | (uint8_t)at[1]);
    }
    static inline int logquarry_load32(const char *at) {
        return (int32_t)((uint32_t)(uint8_t)at[0] << 24 | (uint32_t)(uint8_t)at[1] << 16 |
                         (uint32_t)(uint8_t)at[2] << 8 | (uint8_t)at[3]);
    }
    static inline void logquarry_store16(char *at, long long value) {
        at[0] = (char)(value >> 8);
        at[1] = (char)value;
    }
    static inline void logquarry_store32(char *at, long long value) {
        uint32_t word = (uint32_t)value;
        at[0] = (char)(word >> 24);
        at[1] = (char)(word >> 16);
        at[2] = (char)(word >> 8);
        at[3] = (char)word;
    }
    static inline void logquarry_store64(char *at, long long value) {
        logquarry_store32(at, value >> 32);
        logquarry_store32(at + 4, value);
    }

    /* Makes a PutResult without tuple.__new__, which would need a second tuple. The last field
       (page_cache_ms) has the same value as elapsed_ms. */
    static PyObject *logquarry_result(PyObject *type, PyObject *status, PyObject *appended,
                                      PyObject *host, PyObject *physical, PyObject *queue,
                                      PyObject *size, PyObject *count, PyObject *now,
                                      PyObject *held, PyObject *starts) {
        PyObject *fields[] = {status, appended, host, physical, queue, size,
                              count, now, held, starts, held};
        PyObject *made = PyType_GenericAlloc((PyTypeObject *)type, 11);
        int i;
        if (made == NULL) return NULL;
    #if PY_VERSION_HEX >= 0x030E0000
        /* Since Python 3.14, a tuple stores its hash; -1 means that it is not computed yet. */
        ((PyTupleObject *)made)->ob_hash = -1;
    #endif
        for (i = 0; i < 11; i++)
            PyTuple_SET_ITEM(made, i, Py_NewRef(fields[i]));
        return made;
    }
    /* Dictionary access with a known hash. logquarry_get returns None if the key is missing. */
    static inline PyObject *logquarry_get(PyObject *dict, PyObject *key, Py_hash_t hash) {
        PyObject *found = _PyDict_GetItem_KnownHash(dict, key, hash);
        if (found == NULL && PyErr_Occurred()) return NULL;
        return Py_NewRef(found == NULL ? Py_None : found);
    }
    static inline int logquarry_set(PyObject *dict, PyObject *key, PyObject *value,
                                    Py_hash_t hash) {
    #if PY_VERSION_HEX < 0x030D0000
        return _PyDict_SetItem_KnownHash(dict, key, value, hash);
    #else
        return PyDict_SetItem(dict, key, value);
    #endif
    }
    """
    long long ticks_ns "logquarry_ticks_ns"() nogil
    long long exact_ns "logquarry_exact_ns"() nogil
    long long time_ns "logquarry_time_ns"() nogil
    int load16 "logquarry_load16"(const char *at) nogil
    int load32 "logquarry_load32"(const char *at) nogil
    void store16 "logquarry_store16"(char *at, long long value) nogil
    void store32 "logquarry_store32"(char *at, long long value) nogil
    void store64 "logquarry_store64"(char *at, long long value) nogil
    object result_of "logquarry_result"(
        object type, object status, object appended, object host, object physical, object queue,
        object size, object count, object now, object held, object starts)
    object get_known "logquarry_get"(object dict, object key, Py_hash_t hash)
    int set_known "logquarry_set"(object dict, object key, object value, Py_hash_t hash) except -1

ctypedef uint32_t (*crc32_function)(uint32_t, const char*, size_t) noexcept nogil

cdef int _BLANK, _SIZE_AT, _CRC_AT, _QUEUE_ID_AT, _FLAG_AT, _QUEUE_OFFSET_AT, _PHYSICAL_OFFSET_AT
cdef int _BORN_AT, _RECONSUMED_BACK, _PREPARED_BACK, _BODY_LENGTH_BACK
cdef int _NAME_SIZE, _SEPARATOR_BYTE, _LONGEST, _KEPT_KEYS
cdef long long _INT_MAX
cdef object _PUT_OK, _APPENDED, _ONE_FRAME, _NO_TIME, _Result
cdef bytes _KEYS_BYTES, _TAGS_BYTES

cdef struct Item:
    const char *body
    const char *text
    const char *tags
    Py_ssize_t body_length
    Py_ssize_t text_length
    Py_ssize_t tags_length
    long long properties_length
    long long born
    long long prepared
    long long start
    long long size
    int queue_id
    int flag
    int reconsumed
    uint32_t crc
    bint is_keys

ctypedef Item *item_pointer

@cython.final
cdef class Key:
    cdef tuple key
    cdef Py_hash_t hash

@cython.final
cdef class Topic:
    cdef str name
    cdef bytes data
    cdef list keys
    cdef Key key(self, int queue_id)

@cython.final
cdef class FrameHead:
    cdef object born_host
    cdef object store_host
    cdef object sys_flag
    cdef bytes template
    cdef bytes store_bytes
    cdef Py_ssize_t size
    cdef Py_ssize_t fixed_size
    cdef Py_ssize_t store_time_at
    cdef bint advances
    cdef bint takes_batch

cdef long long measured(Item *item, FrameHead head, bytes topic_data) noexcept
@cython.locals(length=Py_ssize_t)
cdef char *write_frame(
    char *place, FrameHead head, bytes topic_data, const Item *item, long long queue_offset,
    long long physical_offset, long long now
) noexcept

cdef class FrameAppend:
    cdef public object bar
    cdef public object clock
    cdef public dict queue_offsets
    cdef public bint takes_kernels
    cdef public object claim_topic
    cdef public object _lock
    cdef public double _held_since
    cdef public object settle
    cdef Wakes _wakes
    cdef public LastFile _files
    cdef public Refusals _flags
    cdef public HealthReason _health
    cdef str _topic_check
    cdef str _store_host
    cdef long long _largest
    cdef bint _is_wall_clock
    cdef object _batch_topics
    cdef dict _topics
    cdef Recent _recent
    cdef FrameHead _head
    cdef dict _heads
    cdef crc32_function _crc32
    cdef long long _now, _size
    cdef object _now_object, _size_object

    @cython.locals(head=FrameHead, key=tuple)
    cdef FrameHead head_of(self, born_host, store_host, sys_flag)
    @cython.locals(found=Topic)
    cdef Topic topic_of(self, name)
    cdef uint32_t body_crc(self, const char *body, Py_ssize_t length) except? 1

    @cython.locals(
        item="Item *",
        lock=LogLock,
        file=FilePlace,
        key=Key,
        data=bytes,
        place="char *",
        number=Py_ssize_t,
        whole="long long",
        queue_number=int,
        born_time="long long",
        now="long long",
        began="long long",
        at="long long",
        queue_offset="long long",
        physical_offset="long long",
        held=double,
    )
    cdef object append_items(
        self, Topic topic, object queue_id, FrameHead head, object born,
        int reconsumed, long long prepared, Item *items, Py_ssize_t count
    )
