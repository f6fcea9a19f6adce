"""A user's own server: measured over HTTP, its cost terms calibrated from that."""
