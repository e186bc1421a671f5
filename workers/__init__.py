"""Work beside the API: the volume poller, the decision log, and in workers/spark the Spark jobs."""
