# The types in post_office.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
cimport cython

from ringsim.simulator.carriers cimport Line
from ringsim.simulator.handles cimport Channel, Message, Recv, Send
from ringsim.simulator.hub cimport Hub
from ringsim.simulator.moving cimport move_alike
from ringsim.simulator.tape cimport Kind

cdef class PostOffice:
    cdef public Hub _hub
    cdef public object _carry, _line_of
    cdef public Py_ssize_t _limit
    cdef Py_ssize_t _posted
    cdef public dict _channels, _from_any
    @cython.locals(channel=Channel, recv=Message)
    cpdef send(self, Send send)
    @cython.locals(channel=Channel, send=Message)
    cpdef recv(self, Recv recv)
    cdef _wait_for(self, Channel channel, Message message)
    @cython.locals(now=double, kind=Kind, buffered=bint, channel=Channel, line=Line, arrives_s=double)
    cpdef _meet(self, Send send, Recv recv)
