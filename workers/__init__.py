"""Programs next to the API: the observer of volumes, the writer of the decision log, and the jobs over it."""
