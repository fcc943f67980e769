cdef class Modes:
    cdef object _grad, _inference, _dtype, _autocast, _any_autocast, _functions, _dispatches, _saved
    cpdef bint are_common(self)
    cpdef take(self)
    cpdef put(self, object taken)
