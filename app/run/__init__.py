"""The programs: the command line, the supervisor of `quotagate up`, the API server and its wiring."""
