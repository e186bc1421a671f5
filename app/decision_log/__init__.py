"""The decision log from node to writer: batches, their stream and its status, and the columns of files."""
