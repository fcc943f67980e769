# The types in modes.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cdef dict _warnings

cdef class Modes:
    cdef object _grad, _inference, _dtype, _autocast, _any_autocast, _saved, _surroundings, _anomaly, _deterministic, _filter
    cdef Py_ssize_t _functions, _dispatches, _num_filters
    cdef list _filters
    cpdef bint are_common(self)
    cdef bint _is_at_home(self)
    cpdef take(self)
    cpdef leave(self)
    cpdef put(self, object taken)
