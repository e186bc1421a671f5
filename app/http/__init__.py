"""The HTTP wire: requests, access control and answers."""
