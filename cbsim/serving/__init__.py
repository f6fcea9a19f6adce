"""The simulated server behind the endpoint, on the wall clock, a scaled one, or a virtual one."""
