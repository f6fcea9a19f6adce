"""A simulated server behind the endpoint, on the wall clock, a scaled clock, or a virtual clock.

`virtual(scenario)` returns a server for clients in the same process, in virtual time (cbsim.virtual.server).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbsim.virtual.clocks import VirtualTimeError
    from cbsim.virtual.server import VirtualServer, virtual

__all__ = ["VirtualServer", "VirtualTimeError", "virtual"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cbsim.virtual import clocks as virtual_loop
    from cbsim.virtual import server as virtual_server

    return getattr(virtual_loop if name == "VirtualTimeError" else virtual_server, name)
