"""Chats: messages, templates, rendering."""
