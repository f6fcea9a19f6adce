"""An OpenAI-compatible endpoint in front of any server: requests, answers, sockets, metrics."""
