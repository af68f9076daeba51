cimport cython

cdef extern from *:
    """
    #include <string.h>

    typedef struct { const char *at, *end; } logquarry_scan;
    typedef struct { Py_ssize_t size; int is_plain; char bytes[1024]; } logquarry_head;

    static inline void logquarry_put_bytes(logquarry_head *head, const char *from,
                                           Py_ssize_t size) {
        if (size > (Py_ssize_t)sizeof head->bytes - head->size) {
            head->is_plain = 0;
            return;
        }
        memcpy(head->bytes + head->size, from, size);
        head->size += size;
    }

    static inline void logquarry_put_number(logquarry_head *head, long long number) {
        char text[24], *at = text + sizeof text;
        unsigned long long rest = number < 0 ? 0ULL - (unsigned long long)number
                                             : (unsigned long long)number;
        do {
            *--at = (char)('0' + rest % 10);
            rest /= 10;
        } while (rest);
        if (number < 0) *--at = '-';
        logquarry_put_bytes(head, at, text + sizeof text - at);
    }

    /* Appends a text of ASCII that needs no escape; any other text makes the head not plain. */
    static inline void logquarry_put_text(logquarry_head *head, PyObject *text) {
        const unsigned char *from;
        Py_ssize_t size, i;
        if (!PyUnicode_Check(text) || !PyUnicode_IS_COMPACT_ASCII(text)) {
            head->is_plain = 0;
            return;
        }
        from = PyUnicode_1BYTE_DATA(text);
        size = PyUnicode_GET_LENGTH(text);
        for (i = 0; i < size; i++)
            if (from[i] < 0x20 || from[i] > 0x7e || from[i] == '"' || from[i] == '\\\\') {
                head->is_plain = 0;
                return;
            }
        logquarry_put_bytes(head, (const char *)from, size);
    }

    static inline void logquarry_put_word(char *at, unsigned long word) {
        at[0] = (char)(word >> 24);
        at[1] = (char)(word >> 16);
        at[2] = (char)(word >> 8);
        at[3] = (char)word;
    }

    static inline void logquarry_put_prefix(logquarry_head *head, Py_ssize_t body) {
        logquarry_put_word(head->bytes, (unsigned long)(head->size - 4 + body));
        logquarry_put_word(head->bytes + 4, (unsigned long)(head->size - 8));
    }

    /* Moves to the next quote, escape or control character. */
    static inline void logquarry_skip_plain(logquarry_scan *scan) {
        const char *at = scan->at;
        while (at < scan->end && (unsigned char)*at >= 0x20 && *at != '"' && *at != '\\\\') at++;
        scan->at = at;
    }

    static inline int logquarry_hex(char byte) {
        if (byte >= '0' && byte <= '9') return byte - '0';
        if (byte >= 'a' && byte <= 'f') return byte - 'a' + 10;
        if (byte >= 'A' && byte <= 'F') return byte - 'A' + 10;
        return -1;
    }

    static inline int logquarry_is_int(PyObject *value) {
        int overflow;
        long number;
        if (!PyLong_CheckExact(value)) return 0;
        number = PyLong_AsLongAndOverflow(value, &overflow);
        return !overflow && number >= INT32_MIN && number <= INT32_MAX;
    }

    /* Reads a plain number that surely fits; 0 for any other text, which may be a number too. */
    static inline int logquarry_read_number(PyObject *text, int bits, long long *number) {
        const unsigned char *at, *end;
        long long value = 0;
        int is_negative;
        if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text)) return 0;
        at = PyUnicode_1BYTE_DATA(text);
        end = at + PyUnicode_GET_LENGTH(text);
        is_negative = at < end && *at == '-';
        at += is_negative;
        if (at == end || end - at > 18) return 0;
        for (; at < end; at++) {
            if (*at < '0' || *at > '9') return 0;
            value = value * 10 + (*at - '0');
        }
        if (bits < 32 && value > INT32_MAX) return 0;
        *number = is_negative ? -value : value;
        return 1;
    }

    /* Copies a text from `start` on, decodes its escapes, and moves past its closing quote. -1 if
       it has no end, has a control character, or has an escape beyond ASCII. */
    static inline Py_ssize_t logquarry_unescape(logquarry_scan *scan, const char *start, char *to) {
        const char *at = start;
        char *out = to;
        while (at < scan->end) {
            char byte = *at++;
            if (byte == '"') {
                scan->at = at;
                return out - to;
            }
            if ((unsigned char)byte < 0x20) return -1;
            if (byte == '\\\\') {
                if (at == scan->end) return -1;
                byte = *at++;
                switch (byte) {
                case '"': case '\\\\': case '/': break;
                case 'b': byte = '\\b'; break;
                case 'f': byte = '\\f'; break;
                case 'n': byte = '\\n'; break;
                case 'r': byte = '\\r'; break;
                case 't': byte = '\\t'; break;
                case 'u': {
                    int high, low;
                    if (scan->end - at < 4 || at[0] != '0' || at[1] != '0') return -1;
                    high = logquarry_hex(at[2]);
                    low = logquarry_hex(at[3]);
                    if (high < 0 || high > 7 || low < 0) return -1;
                    byte = (char)(high << 4 | low);
                    at += 4;
                    break;
                }
                default: return -1;
                }
            }
            *out++ = byte;
        }
        return -1;
    }
    """
    ctypedef struct Scan "logquarry_scan":
        const char *at
        const char *end
    ctypedef struct Head "logquarry_head":
        Py_ssize_t size
        bint is_plain
        char *bytes
    void put_bytes "logquarry_put_bytes"(Head *head, const char *start, Py_ssize_t size)
    void put_number "logquarry_put_number"(Head *head, long long number)
    void put_text "logquarry_put_text"(Head *head, object text)
    void put_prefix "logquarry_put_prefix"(Head *head, Py_ssize_t body)
    void skip_plain "logquarry_skip_plain"(Scan *scan)
    Py_ssize_t unescape "logquarry_unescape"(Scan *scan, const char *start, char *to)
    int digit_of "logquarry_hex"(char byte)
    bint is_int "logquarry_is_int"(object value)
    bint read_number "logquarry_read_number"(object text, int bits, long long *number)

cdef Py_ssize_t _PREFIX_SIZE, _LARGEST, _MOST_DIGITS
cdef int _TEXT, _BOOL
cdef object _REQUIRED, _new

cpdef encode_head(command)
@cython.locals(head=Head, out="Head *", count=int)
cdef _json_head(
    long long code, long long opaque, long long flag, language, long long version, fields,
    Py_ssize_t body_size
)
@cython.locals(fields=object)
cpdef decode_json(bytes header, bytes body)
cdef bint _is_int(value)
@cython.locals(scan=Scan)
cpdef scan_json(bytes header)
@cython.locals(found=dict, byte=char)
cdef dict _scan_object(Scan *scan, int depth)
@cython.locals(start="const char *", made=bytes, to="char *", size=Py_ssize_t)
cdef _scan_text(Scan *scan)
@cython.locals(
    start="const char *", first="const char *", is_negative=bint, value="long long",
    digits=Py_ssize_t
)
cdef _scan_number(Scan *scan)
@cython.locals(
    size=Py_ssize_t, start=Py_ssize_t, position=Py_ssize_t, end=Py_ssize_t, found=dict
)
cpdef decode_binary(bytes header, bytes body)
cdef Py_ssize_t _end_of(bytes data, Py_ssize_t start, Py_ssize_t end, Py_ssize_t width) except -1
@cython.locals(found=dict, texts=dict, kind=int, number="long long")
cpdef dict parse_fields(tuple expected, ext_fields)
