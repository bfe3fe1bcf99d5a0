"""The sessions of an endpoint, their requests in flight, and the commit of answers."""
