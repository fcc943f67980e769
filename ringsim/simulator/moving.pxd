# The types in moving.py that Cython is to know, where it is compiled: docs/decisions/0014-compiled-from-the-same-source.md.
from ringsim.simulator.tape cimport Kind

cpdef move_alike(object source, object target, Kind kind)
