cdef class Line:
    cdef public double alpha_s, beta_s, free_s
    cpdef double carry(self, double size_bytes, double ready_s)
