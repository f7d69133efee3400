"""From files to weights: safetensors, GGUF, or random ones from a seed."""
