"""Answers from servers: what is said to each kind of server, and many requests at many servers, some of which fail."""
