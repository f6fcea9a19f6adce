"""Conformance with the schedulers that are installed: recorders of the originals, and what compares them with ours."""

ORIGINALS = ("vllm", "sglang", "transformers")
