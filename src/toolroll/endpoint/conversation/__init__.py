"""Which earlier turn a request continues, and the exact prompt of the request."""
