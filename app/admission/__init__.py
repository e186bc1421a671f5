"""The shell around the domain: it turns an ask into a plan, one store call, and a decision."""
