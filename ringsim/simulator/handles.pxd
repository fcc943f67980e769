# The types in handles.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cimport cython

from ringsim.simulator.carriers cimport Line
from ringsim.simulator.hub cimport Hub, Runner
from ringsim.simulator.tape cimport Kind, Tape

cdef class Operation:
    cdef object __weakref__
    cdef public Py_ssize_t op, slot
    cdef public Runner rank
    cdef public object group, error
    cdef public Kind kind
    cdef public double done_s
    cdef public bint waiting
    @cython.locals(slot=Py_ssize_t, rank=Runner, hub=Hub, tape=Tape)
    cpdef bint wait(self, object timeout=*) except -1
    cpdef complete(self, double time_s)

cdef class Message(Operation):
    cdef public Py_ssize_t number, peer, tag
    cdef public object tensor
    cdef public Channel channel
    cdef public Message behind
    cpdef begin(
        self, Py_ssize_t op, Runner rank, Py_ssize_t slot, object group, Kind kind, object tensor, Py_ssize_t peer, Py_ssize_t tag,
        Channel channel
    )

cdef class Send(Message):
    cdef public double arrives_s
    cdef public Recv met

cdef class Recv(Message):
    pass

cdef class Channel:
    cdef public object group
    cdef public Py_ssize_t src, dst, tag
    cdef public Message first, last
    cdef public Line line
    cdef public Kind kind
    cpdef append(self, Message message)
