"""The phases of a step on the CPU, in their order: what the loop yields, the tables record and a cost model prices."""

PHASES = ("schedule", "prepare", "launch", "await", "update")
WORKED = tuple(phase for phase in PHASES if phase != "await")
"""Those in which the CPU works: in `await` it waits for the device."""
