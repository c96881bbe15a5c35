"""The service desk of an airline: tools over a database of flights and reservations, a policy, and a customer."""
