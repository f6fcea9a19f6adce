"""Hugging Face transformers' own continuous batching, served and recorded like ours."""
