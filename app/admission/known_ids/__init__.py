"""The producer ids that this node knows, and answers for without the store."""
