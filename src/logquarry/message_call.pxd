cdef extern from *:
    """
    #define LOGQUARRY_MOST_FIELDS 32
    static PyObject *names, *defaults, *types, *reference;

    /* The new tuple; NULL without an error if the reference has to make it. */
    static PyObject *logquarry_usual(PyObject *kind, PyObject *const *args, size_t flags,
                                     PyObject *words) {
        PyObject *values[LOGQUARRY_MOST_FIELDS], *made;
        Py_ssize_t given = PyVectorcall_NARGS(flags), fields = PyTuple_GET_SIZE(names), i, j;
        Py_ssize_t count = words == NULL ? 0 : PyTuple_GET_SIZE(words);
        if (given > 2) return NULL; /* the reference takes two arguments by their place */
        for (i = 0; i < fields; i++)
            values[i] = i < given ? args[i] : PyTuple_GET_ITEM(defaults, i);
        for (i = 0; i < count; i++) {
            /* Names in a program's text are the same objects as those of the fields. */
            PyObject *word = PyTuple_GET_ITEM(words, i);
            for (j = given; j < fields && PyTuple_GET_ITEM(names, j) != word; j++);
            if (j == fields) return NULL;
            values[j] = args[given + i];
        }
        if (values[0] == PyTuple_GET_ITEM(defaults, 0)) return NULL;
        for (i = 0; i < fields; i++)
            if (values[i] != PyTuple_GET_ITEM(defaults, i) &&
                (PyObject *)Py_TYPE(values[i]) != PyTuple_GET_ITEM(types, i))
                return NULL;
        made = PyType_GenericAlloc((PyTypeObject *)kind, fields);
        if (made == NULL) return NULL;
        for (i = 0; i < fields; i++) {
            Py_INCREF(values[i]);
            PyTuple_SET_ITEM(made, i, values[i]);
        }
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
