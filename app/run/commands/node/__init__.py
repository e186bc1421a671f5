"""The node that a command asks: its address and key, requests to it, and lists page by page."""
