"""What is asked: synthetic prompts of exact length, chats, and recorded traces."""
