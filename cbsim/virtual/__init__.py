"""A simulated server behind the endpoint, on the wall clock, a scaled clock, or a virtual clock.

`virtual(scenario)` returns a server for clients in the same process, in virtual time (cbsim.virtual.server).
"""

from cbsim.virtual.clocks import VirtualTimeError
from cbsim.virtual.server import VirtualServer, virtual

__all__ = ["VirtualServer", "VirtualTimeError", "virtual"]
