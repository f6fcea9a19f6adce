"""The engine behind an endpoint: an event loop that clients talk to, and a thread that serves them."""
