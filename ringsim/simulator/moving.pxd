cimport cython

from ringsim.simulator.tape cimport Kind

@cython.locals(views=dict)
cpdef move_alike(object source, object target, Kind kind)
