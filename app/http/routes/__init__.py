"""The routes, a file for each noun."""
