"""The routers: which of several servers gets a request."""
