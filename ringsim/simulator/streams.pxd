# The types in streams.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
from ringsim.simulator.memory cimport Regions

cdef dict _python

cdef class States:
    cdef public bytearray words, signs
    cdef public object gauss_next

cdef class Streams:
    cdef public bint fast
    cdef Regions _words, _signs
    cpdef take(self, object state=*)
    cpdef bint hold(self, States state)
    cpdef put(self, object state)
