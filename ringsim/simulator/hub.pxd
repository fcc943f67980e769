# The types in hub.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
from ringsim.simulator.modes cimport Modes
from ringsim.simulator.streams cimport Streams
from ringsim.simulator.tape cimport Tape

cdef class Runner:
    cdef public Py_ssize_t number
    cdef public object seed, greenlet, modes, states
    cdef public Hub hub
    cdef public Tape tape

cdef class Hub:
    cdef public double now
    cdef public Py_ssize_t polls
    cdef public object cores
    cdef public bint measures
    cdef public Runner current
    cdef double _resumed_s
    cdef set _asking
    cdef object _ready
    cdef dict _later
    cdef list _times
    cdef Streams _streams
    cdef Modes _modes
    cdef Runner _outside
    cpdef wake(self, object what, double time_s)
    cpdef work(self, double seconds)
    cdef _refuse(self, double time_s)
    cpdef sleep_until(self, double time_s)
    cpdef pause(self)
    cdef _give_way(self)
    cdef _switch(self, Runner me, Runner other)
    cdef _pop(self)
