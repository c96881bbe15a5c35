"""The service desk of a shop: an agent with tools, a policy and a database serves a customer in a conversation."""
