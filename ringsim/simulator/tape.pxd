# The types in tape.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cimport cython

from ringsim.simulator.memory cimport Layout

cdef Py_ssize_t _RECORD_WORDS, _NUMBERS_AT, _CODES_AT

cdef class Kind:
    cdef public Py_ssize_t number, size_bytes
    cdef public object payload
    cdef public bint plain
    cdef public Layout layout

cdef class Tape:
    cdef public double[::1] times
    cdef public set failed
    cdef public dict followed
    cdef public object sites
    cdef object _memory, _payloads, _groups, _labels, _files
    cdef int[::1] _numbers
    cdef long long[::1] _codes
    cdef dict _places, _kinds
    @cython.locals(kind=Kind)
    cpdef Kind kind_of(self, object tensor)
    cdef Py_ssize_t _end
    cpdef Py_ssize_t post(
        self, double now, Py_ssize_t rank, Py_ssize_t op, Py_ssize_t group, Py_ssize_t peer, Py_ssize_t tag, Py_ssize_t payload, object frame
    )
    @cython.locals(slot=Py_ssize_t, at=Py_ssize_t)
    cpdef Py_ssize_t write(
        self, double now, Py_ssize_t rank, Py_ssize_t op, Py_ssize_t group, Py_ssize_t peer, Py_ssize_t tag, Py_ssize_t payload,
        Py_ssize_t label, tuple place
    )
