"""SGLang's scheduler on a radix tree."""
