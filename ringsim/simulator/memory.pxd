# What other compiled modules may ask of memory.pyx directly: docs/decisions/0016-a-look-instead-of-a-question.md.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

cdef enum:
    MOST_REGIONS = 16
    MOST_DIMS = 8

# A tensor as DLPack describes it (dlpack.h, version 1).
cdef struct DLTensor:
    void* data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef class Regions:
    cdef tuple _views
    cdef Py_ssize_t _count, _total
    cdef char* _places[MOST_REGIONS]
    cdef size_t _sizes[MOST_REGIONS]
    cpdef bytearray copy(self)
    cpdef read(self, bytearray kept)
    cpdef write(self, bytearray kept)
    cpdef bint match(self, bytearray kept)
    cdef char* _check(self, bytearray kept) except NULL

cdef class Layout:
    cdef bint _is_known, _is_given_up
    cdef uint8_t _code, _bits
    cdef uint16_t _lanes
    cdef int32_t _ndim
    cdef int64_t _shape[MOST_DIMS]
    cdef size_t _size_bytes
    cdef bint _describes(self, object tensor, DLTensor* seen)
    cdef bint _look_at(self, object tensor, DLTensor* seen)
    cpdef learn(self, object tensor)
    cpdef bint fits(self, object tensor)
    cpdef bint copy(self, object source, object target)
