"""The continuous batching of Hugging Face transformers, 5.17 and 5.23."""
