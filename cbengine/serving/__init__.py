"""The engine behind an endpoint: an event loop that clients connect to, and a thread that serves them."""
