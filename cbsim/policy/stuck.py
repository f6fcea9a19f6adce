"""The end of a run that cannot go on. Not compiled: mypyc's exceptions do not outlive a weak reference."""


class StuckError(Exception):
    """The scheduler holds requests, can plan nothing, and nothing is in flight that could change that."""
