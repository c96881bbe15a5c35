"""A telephone company's support desk: the agent acts in the customer system, the customer on the phone."""
