# The types in modes.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
from ringsim.simulator.memory cimport Regions

cdef dict _warnings
cdef object _grad, _inference, _autocast, _dtype, _functions, _dispatches, _backward, _saved, _functorch, _anomaly, _deterministic, _loop

cdef class Modes:
    cdef object _grad, _inference, _dtype, _autocast, _any_autocast, _saved, _surroundings, _anomaly, _deterministic, _filter
    cdef Py_ssize_t _functions, _dispatches, _num_filters
    cdef list _filters
    cdef Regions _words
    cdef bytearray _kept
    cpdef bint are_common(self)
    cdef bint _are_all_common(self)
    cdef bint _is_process_common(self)
    cdef bint _is_at_home(self)
    cpdef take(self)
    cpdef leave(self)
    cpdef put(self, object taken)
