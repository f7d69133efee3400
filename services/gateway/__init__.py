"""The HTTP front: OpenAI requests in, sequences to the workers, tokens back as text. Never imports torch."""
