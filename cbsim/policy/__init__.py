"""Scheduling policy, shared by the simulator and the engine. Standard library only; knows no clock and no device."""
