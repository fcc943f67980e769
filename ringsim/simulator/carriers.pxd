# The types in carriers.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cdef class Line:
    cdef public double alpha_s, beta_s, free_s
    cpdef double carry(self, double size_bytes, double ready_s)
