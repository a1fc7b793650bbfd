"""Compressed documents: reading, questions, chats, appending and merging."""
