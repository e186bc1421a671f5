"""Work beside the API: the volume poller and the decision log, and in workers/spark the audit and replay jobs."""
