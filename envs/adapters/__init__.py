"""Environments of other libraries, each imported only where one of its environments is made."""
