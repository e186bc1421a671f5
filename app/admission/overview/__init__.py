"""The samples of this process, and the overview that adds up those of all processes."""
