# cython: boundscheck=False, wraparound=False
"""The same as memory.py, which says what each part is for, where there is a C compiler.

A tensor is looked at through DLPack's exchange API, which torch offers to other libraries: one call of a C function fills a struct with the
address, dtype, shape and strides, and makes no Python object.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.exc cimport PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport uint32_t
from libc.string cimport memcmp, memcpy, memmove

from torch import Tensor, strided

__all__ = ["Layout", "Regions"]

cdef enum:
    _CPU = 1  # kDLCPU


cdef struct ExchangeApi:  # DLPackExchangeAPI
    uint32_t major
    uint32_t minor
    ExchangeApi* older
    void* allocate
    void* managed_of_object
    void* object_of_managed
    int (*look)(void* tensor, DLTensor* seen) noexcept  # dltensor_from_py_object_no_sync
    void* stream


cdef ExchangeApi* _find_api():
    """Returns what torch offers in version 1, NULL where it offers nothing."""
    cdef ExchangeApi* api
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    api = <ExchangeApi*> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while api != NULL and api.major != 1:
        api = api.older
    return NULL if api == NULL or api.look == NULL else api


cdef ExchangeApi* _api = _find_api()


cdef class Regions:
    """Some places in memory, which are kept, put back and compared together.

    Example:
        >>> one, other = bytearray(b"spam"), bytearray(b"eggs")
        >>> regions = Regions([memoryview(one), memoryview(other)[1:]])
        >>> kept = regions.copy()
        >>> one[0], other[0] = b"SE"
        >>> regions.match(kept)
        False
        >>> regions.write(kept)
        >>> one, other
        (bytearray(b'spam'), bytearray(b'Eggs'))
    """

    def __init__(self, views):
        cdef unsigned char[::1] view
        self._views = tuple(views)
        self._count = len(self._views)
        if self._count > MOST_REGIONS:
            raise ValueError(f"views must be at most {MOST_REGIONS}, got {self._count}.")
        self._total = 0
        for place, each in enumerate(self._views):
            view = each
            self._places[place] = <char*> &view[0]
            self._sizes[place] = view.shape[0]
            self._total += view.shape[0]

    cpdef bytearray copy(self):
        kept = bytearray(self._total)
        self.read(kept)
        return kept

    cpdef read(self, bytearray kept):
        cdef char* at = self._check(kept)
        cdef Py_ssize_t place
        for place in range(self._count):
            memcpy(at, self._places[place], self._sizes[place])
            at += self._sizes[place]

    cpdef write(self, bytearray kept):
        cdef char* at = self._check(kept)
        cdef Py_ssize_t place
        for place in range(self._count):
            memcpy(self._places[place], at, self._sizes[place])
            at += self._sizes[place]

    cpdef bint match(self, bytearray kept):
        cdef char* at = self._check(kept)
        cdef Py_ssize_t place
        for place in range(self._count):
            if memcmp(at, self._places[place], self._sizes[place]) != 0:
                return False
            at += self._sizes[place]
        return True

    cdef char* _check(self, bytearray kept) except NULL:
        if PyByteArray_GET_SIZE(kept) != self._total:
            raise ValueError(f"kept must be {self._total} bytes, got {len(kept)}.")
        return PyByteArray_AS_STRING(kept)


cdef class Layout:
    """What the dense tensors of one dtype and shape have in common that lie in the memory of the CPU."""

    cpdef learn(self, object tensor):
        cdef DLTensor seen
        cdef int place
        if self._is_known or self._is_given_up or _api == NULL:
            return
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not strided or not self._look_at(tensor, &seen):
            return
        if seen.ndim > MOST_DIMS:
            self._is_given_up = True
            return
        self._code, self._bits, self._lanes, self._ndim = seen.code, seen.bits, seen.lanes, seen.ndim
        for place in range(seen.ndim):
            self._shape[place] = seen.shape[place]
        self._size_bytes = tensor.nbytes
        self._is_known = True

    cpdef bint fits(self, object tensor):
        cdef DLTensor seen
        return self._is_known and self._describes(tensor, &seen)

    cpdef bint copy(self, object source, object target):
        cdef DLTensor out, into
        if not (self._is_known and self._describes(source, &out) and self._describes(target, &into)):
            return False
        if not (_is_contiguous(&out) and _is_contiguous(&into)):
            return False
        memmove(<char*> into.data + into.byte_offset, <char*> out.data + out.byte_offset, self._size_bytes)
        return True

    cdef bint _describes(self, object tensor, DLTensor* seen):
        """Tells whether this is a tensor of the kind, and looks at it."""
        return (
            type(tensor) is Tensor
            and self._look_at(tensor, seen)
            and seen.device_type == _CPU
            and seen.code == self._code
            and seen.bits == self._bits
            and seen.lanes == self._lanes
            and seen.ndim == self._ndim
            and memcmp(seen.shape, self._shape, self._ndim * sizeof(int64_t)) == 0
        )

    cdef bint _look_at(self, object tensor, DLTensor* seen):
        """Looks at a tensor; where that cannot be done, on the meta device or in a transformation, that is never tried again: it is slow."""
        if _api.look(<void*> tensor, seen) == 0:
            return True
        PyErr_Clear()
        self._is_known, self._is_given_up = False, True
        return False


cdef bint _is_contiguous(DLTensor* seen):
    cdef int64_t expected = 1
    cdef int place
    for place in range(seen.ndim - 1, -1, -1):
        if seen.shape[place] != 1 and seen.strides[place] != expected:
            return False
        expected *= seen.shape[place]
    return True
