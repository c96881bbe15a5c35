"""Environments of other libraries, which are imported only when one of their environments is created."""
