# The types in streams.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cdef class States:
    cdef public unsigned int[::1] python, numpy
    cdef public long long[::1] ahead, torch
    cdef public object gauss_next
    cdef public Py_ssize_t last, tail
    cpdef write(self, States other)
    cpdef bint match(self, States other)

cdef class Streams:
    cdef public bint fast
    cdef States _now
    cpdef take(self, object state=*)
    cpdef bint hold(self, States state)
    cpdef put(self, object state)
