# The types in modes.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cdef class Modes:
    cdef object _grad, _inference, _dtype, _autocast, _any_autocast, _functions, _dispatches, _saved
    cpdef bint are_common(self)
    cpdef take(self)
    cpdef put(self, object taken)
