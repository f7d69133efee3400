"""Text: tokenizer, incremental detokenizer, stop strings and chat templates. Without torch."""
