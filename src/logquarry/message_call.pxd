cdef extern from *:
    """
    #define LOGQUARRY_MOST_FIELDS 32
    static PyObject *names, *defaults, *types, *reference;

    /* The places of the fields that the last call named: most programs make all messages by one
       call in their text, and its names are one tuple. */
    static PyObject *last_words;
    static Py_ssize_t last_given, last_places[LOGQUARRY_MOST_FIELDS];

    static int logquarry_places(PyObject *words, Py_ssize_t given) {
        Py_ssize_t fields = PyTuple_GET_SIZE(names), count = PyTuple_GET_SIZE(words), i, j;
        if (count > fields - given) return 0;
        Py_CLEAR(last_words);
        for (i = 0; i < count; i++) {
            /* Names in a program's text are the same objects as those of the fields. */
            PyObject *word = PyTuple_GET_ITEM(words, i);
            for (j = given; j < fields && PyTuple_GET_ITEM(names, j) != word; j++);
            if (j == fields) return 0;
            last_places[i] = j;
        }
        last_words = Py_NewRef(words), last_given = given;
        return 1;
    }

    /* Whether a value needs no check. */
    static inline int logquarry_is_usual(PyObject *value, Py_ssize_t field) {
        return (PyObject *)Py_TYPE(value) == PyTuple_GET_ITEM(types, field) ||
               value == PyTuple_GET_ITEM(defaults, field);
    }

    /* The new tuple; NULL without an error if the reference has to make it. */
    static PyObject *logquarry_usual(PyObject *kind, PyObject *const *args, size_t flags,
                                     PyObject *words) {
        PyObject *made;
        Py_ssize_t given = PyVectorcall_NARGS(flags), fields = PyTuple_GET_SIZE(names), i;
        Py_ssize_t count = words == NULL ? 0 : PyTuple_GET_SIZE(words);
        if (given > 2) return NULL; /* the reference takes two arguments by their place */
        for (i = 0; i < given; i++)
            if (!logquarry_is_usual(args[i], i)) return NULL;
        if (count) {
            if ((words != last_words || given != last_given) && !logquarry_places(words, given))
                return NULL;
            for (i = 0; i < count; i++)
                if (!logquarry_is_usual(args[given + i], last_places[i])) return NULL;
        }
        /* This may run the garbage collector, and so another call. */
        made = PyType_GenericAlloc((PyTypeObject *)kind, fields);
        if (made == NULL) return NULL;
    #if PY_VERSION_HEX >= 0x030E0000
        /* Since Python 3.14, a tuple stores its hash; -1 means that it is not computed yet. */
        ((PyTupleObject *)made)->ob_hash = -1;
    #endif
        if (count && (words != last_words || given != last_given) &&
            !logquarry_places(words, given)) {
            Py_DECREF(made);
            return NULL;
        }
        for (i = 0; i < given; i++)
            PyTuple_SET_ITEM(made, i, Py_NewRef(args[i]));
        for (i = 0; i < count; i++)
            PyTuple_SET_ITEM(made, last_places[i], Py_NewRef(args[given + i]));
        if (PyTuple_GET_ITEM(made, 0) == NULL) { /* the first field has no default */
            Py_DECREF(made);
            return NULL;
        }
        for (i = given; i < fields; i++)
            if (PyTuple_GET_ITEM(made, i) == NULL)
                PyTuple_SET_ITEM(made, i, Py_NewRef(PyTuple_GET_ITEM(defaults, i)));
        return made;
    }

    static PyObject *logquarry_call(PyObject *kind, PyObject *const *args, size_t flags,
                                    PyObject *words) {
        PyObject *made = logquarry_usual(kind, args, flags, words), **all;
        Py_ssize_t given = PyVectorcall_NARGS(flags);
        Py_ssize_t count = given + (words == NULL ? 0 : PyTuple_GET_SIZE(words));
        if (made != NULL || PyErr_Occurred()) return made;
        all = PyMem_New(PyObject *, count + 1);
        if (all == NULL) return PyErr_NoMemory();
        all[0] = kind;
        memcpy(all + 1, args, count * sizeof *all);
        made = PyObject_Vectorcall(reference, all, given + 1, words);
        PyMem_Free(all);
        return made;
    }

    static void logquarry_install(PyObject *kind, PyObject *n, PyObject *d, PyObject *t,
                                  PyObject *r) {
        if (PyTuple_GET_SIZE(n) > LOGQUARRY_MOST_FIELDS) return;
        names = Py_NewRef(n), defaults = Py_NewRef(d), types = Py_NewRef(t);
        reference = Py_NewRef(r);
        ((PyTypeObject *)kind)->tp_vectorcall = logquarry_call;
    }
    """
    void install "logquarry_install"(object kind, object names, object defaults, object types, object reference)
