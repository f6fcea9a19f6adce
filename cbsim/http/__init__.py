"""One OpenAI-compatible endpoint in front of any server: what clients say, what they are told, what is measured."""
