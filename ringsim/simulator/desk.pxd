# The types in desk.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cimport cython

from ringsim.simulator.handles cimport Channel, Recv, Send
from ringsim.simulator.hub cimport Hub, Runner
from ringsim.simulator.post_office cimport PostOffice
from ringsim.simulator.tape cimport Kind

cdef int _USER

cdef class Desk(Runner):
    cdef public bint records, hooked
    cdef public object everybody, calibration
    cdef public PostOffice _office
    cdef public dict _to, _from
    cdef tuple _look_closer(self, object tensor, Channel channel)
    @cython.locals(channel=Channel, kind=Kind, slot=Py_ssize_t, handle=Send)
    cpdef begin_send(self, object tensor, object dst, object group, object tag, object group_dst, object op=*)
    @cython.locals(channel=Channel, kind=Kind, slot=Py_ssize_t, handle=Recv)
    cpdef begin_recv(self, object tensor, object src, object group, object tag, object group_src, object op=*)
